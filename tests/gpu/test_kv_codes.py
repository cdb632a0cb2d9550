"""Pages in codes of 8 bits, served: the logits of an oracle whose pages hold what the codes mean, whatever is beside.

The oracle rounds each row as it is written, and computes as it does without codes; rows that were offloaded are the
host's in both.
"""

import dataclasses

import numpy as np
import pytest
import torch

from gpu.host.gathered import GatheredKv
from gpu.kv.pool import KvPool, PoolShape
from gpu.model.architecture import named_shape
from tests.gpu.method_counts import counts_of
from tests.gpu.paged_rows import read_raw
from tests.gpu.reference_model import document_prompt, generate, needle_prompt, reference_runner, tokenizer
from tests.gpu.test_predicted_serving import WIDE, PredictedTwins
from tests.gpu.twin_runners import Kv, Twins, furthest
from tests.tolerances import KV_FLIP_LOGITS, KV_ROUNDED_AGAIN_LOGITS
from transfer.reading import Reading

on_codes = pytest.mark.parametrize("kv", ["int8", "fp8"])
PROMPTS = [document_prompt(length, length) for length in (300, 70)]


def steps(twins: Twins, slots: list[int], count: int) -> float:
    """How far the logits of so many steps are from the oracle's, at most."""
    most = 0.0
    for _ in range(count):
        assert not twins.step(slots).failures
        most = max(most, furthest(twins, slots))
    return most


@on_codes
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_what_stays_and_what_is_offloaded_is_what_the_codes_mean(kv: Kv, reading: Reading) -> None:
    """Prompt, decode, offload blocks, pages that are evicted, in two rows."""
    twins = Twins(kv=kv, reading=reading)
    twins.prefill(PROMPTS)
    assert steps(twins, [0, 1], 16) < KV_FLIP_LOGITS
    assert twins.sequences[0].released > 16


@on_codes
def test_an_oracle_without_codes_is_further_off(kv: Kv, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.gpu.twin_runners.round_what_is_written", lambda runner, stored: None)
    twins = Twins(kv=kv)
    twins.prefill(PROMPTS[:1])
    assert steps(twins, [0], 10) > KV_ROUNDED_AGAIN_LOGITS[kv]


@on_codes
def test_a_prompt_that_is_offloaded_leaves_codes_in_its_window(kv: Kv) -> None:
    """It is computed in the compute dtype, so the oracle, which reads codes from the start, is a rounding off."""
    twins = Twins(kv=kv)
    twins.prefill_down(0, PROMPTS[0])
    assert steps(twins, [0], 20) < KV_ROUNDED_AGAIN_LOGITS[kv]


@on_codes
def test_rows_that_come_back_are_made_codes_of_again(kv: Kv) -> None:
    twins = Twins(kv=kv)
    twins.prefill(PROMPTS[:1])
    steps(twins, [0], 12)
    twins.restore(twins.fetch(twins.sequences[0], 48))
    assert twins.sequences[0].released == 48
    assert steps(twins, [0], 5) < KV_ROUNDED_AGAIN_LOGITS[kv]


@on_codes
def test_blocks_that_are_fetched_stand_in_slots_as_codes(kv: Kv) -> None:
    twins = PredictedTwins(WIDE, check_coverage=True, kv=kv)
    twins.prefill_down(0, PROMPTS[0])
    assert steps(twins, [0], 12) < KV_ROUNDED_AGAIN_LOGITS[kv]
    store = twins.side.blocks
    assert store.keys.dtype == twins.offloading.pool.key_pages[0].dtype
    assert store.keys.shape[-1] == twins.offloading.pool.dim + 4
    assert counts_of(twins.side).read_tokens > 0


@on_codes
def test_rows_are_offloaded_without_being_rounded_to_bf16_on_the_way(kv: Kv) -> None:
    """By many tokens at once, a layer after another, and by offload blocks of all layers."""
    twins = Twins(kv=kv, dtype="bfloat16", kept_tokens=10_000, offload_block_tokens=16)
    twins.prefill(PROMPTS[:1])
    for _ in range(24):
        twins.step([0])
    sequence, pool = twins.sequences[0], twins.offloading.pool
    assert sequence.run_end > 240
    differs = 0
    for place, layer in enumerate(twins.tier.shape.layers):
        ids = torch.tensor(sequence.pages)
        rows, _ = read_raw(pool.key_pages[layer][ids])
        exact = torch.from_numpy(rows.swapaxes(0, 1).reshape(pool.num_kv_heads, -1, pool.dim)).float()
        begin = 16
        for segment in twins.tier.rows(sequence.context_id, place, sequence.run_end - 16):
            own = exact[:, begin : begin + segment.keys.shape[1]]
            begin += own.shape[1]
            assert torch.equal(segment.keys, (own - segment.centre[:, None]).bfloat16())
            differs += int((segment.keys != (own.bfloat16() - segment.centre[:, None]).bfloat16()).sum())
        assert begin == sequence.run_end
    assert differs > 0


@pytest.mark.parametrize("kv_heads", [1, 2, 5])
def test_a_layer_is_gathered_exactly_some_heads_after_others(kv_heads: int) -> None:
    shape = dataclasses.replace(named_shape("tiny"), num_kv_heads=kv_heads, num_heads=kv_heads)
    pool = KvPool(shape, PoolShape(12, (), 16, 2, 160, torch.bfloat16, kv="int8"), torch.device("cpu"))
    rows = [torch.randn(kv_heads, 160, shape.dim, generator=torch.manual_seed(seed)).bfloat16() for seed in range(2)]
    ids = torch.tensor(np.random.default_rng(0).permutation(12)[:10])
    pool.page_table[1] = ids.int()
    pool.write(2, ids, *rows)
    gathered, seen = GatheredKv(pool, kv_heads, shape.dim), []
    wanted = [read_raw(pages[2][ids])[0].swapaxes(0, 1).reshape(kv_heads, 160, -1)
              for pages in (pool.key_pages, pool.value_pages)]  # fmt: skip
    for heads, keys, values in gathered.gather_exact(1, 2, 150):
        seen += range(heads.start, heads.stop)
        for got, all_rows in zip((keys, values), wanted, strict=True):
            assert got.dtype == torch.float32
            assert np.array_equal(got.numpy(), all_rows[heads, :150].astype(np.float32))
    assert seen == list(range(kv_heads))


@on_codes
def test_the_reference_model_finds_what_it_is_asked_for(kv: Kv) -> None:
    prompts = [needle_prompt(500, seed) for seed in (0, 2)]
    texts = [[tokenizer().decode(ids) for ids in generate(reference_runner(kv=one, num_pages=100), prompts, 10).tokens]
             for one in ("auto", kv)]  # fmt: skip
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kv", ["int8", "bfloat16"])
def test_texts_of_the_compiled_step_over_int8_and_over_bf16_are_those_of_the_layers(kv: Kv) -> None:
    prompts, texts = [needle_prompt(300, 2), document_prompt(70, 1)], []
    for is_compiled in (True, False):
        runner = reference_runner(kv=kv, num_pages=60)
        assert runner.decode_steps._compiled is not None
        if not is_compiled:
            runner.decode_steps._compiled = None
        texts.append(generate(runner, prompts, 30).tokens)
    assert texts[0] == texts[1]


@pytest.mark.gpu
@on_codes
@pytest.mark.parametrize("reading", [Reading.WHOLE, Reading.SAMPLE])
def test_on_cuda_graphs_read_what_the_codes_mean(kv: Kv, reading: Reading) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    twins = Twins(kv=kv, reading=reading, device="cuda", graph_batch_sizes=(1, 2))
    twins.prefill(PROMPTS)
    assert steps(twins, [0, 1], 30) < KV_FLIP_LOGITS
