"""Prompts that are attended to by one kernel see their own keys and no others: part by part, and in the whole."""

import numpy as np
import pytest
import torch

import gpu.prefill.unit_attention
from gpu.attention.flash3 import has_flash3
from gpu.attention.prefill_attention import Packing, Whole, packed_prefill_attention, prefill_attention_reference
from gpu.attention.prefill_query import Attended, joined
from gpu.host.gathered import GatheredKv
from gpu.kv.pool import KvPool, PoolShape
from gpu.model.architecture import named_shape
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import PageWrite, PrefillJob, PrefillPrompt, StepPlan, StepResult
from tests.gpu.poison import poison_pool
from tests.gpu.reference_model import NUM_LAYERS, Pages, document_prompt, layer_units, reference_runner
from tests.tolerances import ATTENTION_BF16_ATOL, BF16_LOGPROB_ATOL, CHUNKING_LOGPROB_ATOL

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
SHAPES = [(1, 1), (5, 5), (1, 77), (64, 64), (33, 130), (200, 1031), (16, 16)]  # (tokens, context) of each prompt
LENGTHS = [150, 3, 40, 97]


def starts(counts: list[int], device: str) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", ["flash", "flash3"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(8, 2, 64), (4, 4, 128), (3, 1, 32), (8, 1, 256), (4, 2, 80)])
def test_each_of_many_prompts_is_attended_to_by_the_definition(
    heads: int, kv_heads: int, dim: int, kernel: Whole
) -> None:
    if kernel == "flash3" and not has_flash3(torch.empty(1, dim, dtype=torch.bfloat16, device="cuda")):
        pytest.skip("fa3-fwd is not installed, or has no kernels for this card")
    draw = torch.Generator().manual_seed(dim)
    counts, contexts = (list(numbers) for numbers in zip(*SHAPES, strict=True))
    query, key, value = (
        torch.randn((sum(rows), width, dim), generator=draw).to(torch.bfloat16)
        for rows, width in ((counts, heads), (contexts, kv_heads), (contexts, kv_heads))
    )
    packing = Packing(starts(counts, "cuda"), starts(contexts, "cuda"), max(counts), max(contexts))
    got = packed_prefill_attention(query.cuda(), key.cuda(), value.cuda(), packing, 0.125, kernel=kernel).out
    of_queries = [tensor.cpu().double().split(counts) for tensor in (query, got)]
    of_keys = [tensor.double().split(contexts) for tensor in (key, value)]
    for own, out, keys, values in zip(*of_queries, *of_keys, strict=True):
        wanted = prefill_attention_reference(own, keys.transpose(0, 1), values.transpose(0, 1), 0.125)
        np.testing.assert_allclose(out, wanted.out, atol=ATTENTION_BF16_ATOL, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_keys_and_values_of_several_prompts_lie_one_after_another(device: str) -> None:
    """Pages in any order, some shared, of prompts that end within one; NaN in what nobody wrote."""
    shape, page = named_shape("tiny"), 16
    pool = KvPool(shape, PoolShape(40, (), page, 4, 100, torch.float32), torch.device(device))
    poison_pool(pool)
    rows = {2: [7, 0, 31], 0: [12], 3: [7, 0, 5, 6]}
    pool.write_pages([PageWrite(slot, 0, pages) for slot, pages in rows.items()])
    contexts = {2: 40, 0: 3, 3: 61}
    for pages in (pool.key_pages[1], pool.value_pages[1]):
        pages[[7, 0, 31, 12, 5, 6]] = torch.randn(6, *pages.shape[1:]).to(device)
        pages[31, :, 8:], pages[12, :, 3:], pages[6, :, 13:] = (torch.nan,) * 3
    gathered = GatheredKv(pool, shape.num_kv_heads, shape.dim)
    cells = [(slot, token) for slot, context in contexts.items() for token in range(context)]
    slots, positions = torch.tensor(cells, device=device).unbind(1)
    packed = [one.clone() for one in gathered.pack(1, gathered.rows_of(slots, positions))]
    begin = 0
    for slot, context in contexts.items():
        for one, whole in zip(packed, gathered.gather(0, slot, 1, context), strict=True):
            assert torch.equal(one[begin : begin + context], whole.transpose(0, 1))
        begin += context
    assert begin == len(packed[0])
    kept = gathered.gather(0, 3, 1, 50)[0].clone()
    gathered.pack(1, gathered.rows_of(slots, positions))
    assert torch.equal(gathered.gather(0, 3, 1, 61)[0][:, :50], kept), "what was packed over is gathered anew"


@pytest.mark.gpu
def test_prompts_attended_to_together_are_told_what_they_are_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole prompts, chunks that end within some of them, and prompts that go on from pages of others."""
    together = prompt_logprobs()
    monkeypatch.setattr(gpu.prefill.unit_attention, "MOST_PACKED_TOKENS", 0)
    apart = prompt_logprobs()
    for key, wanted in apart.items():
        assert np.isfinite(wanted).all()
        np.testing.assert_allclose(together[key], wanted, atol=BF16_LOGPROB_ATOL, rtol=0)
    assert len(apart) == len(LENGTHS) + 1


def test_a_prompt_that_began_with_others_may_end_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A unit holds the first prompt and a part of the second, the next one the rest of the second by itself."""

    def drawn(chunk_tokens: int) -> list[int]:
        runner = reference_runner("float32", "cpu", max_running=4, num_pages=40, max_context_tokens=256)
        pages, asks = Pages(runner), SamplingParams(temperature=0.0)
        prompts = [document_prompt(length, length) for length in (40, 50)]
        job = PrefillJob(1, [PrefillPrompt(slot, ids, 0, len(ids), asks, "exact") for slot, ids in enumerate(prompts)])
        writes = [pages.take(slot, len(ids) + 1) for slot, ids in enumerate(prompts)]
        units = layer_units(job, chunk_tokens, runner.architecture.num_layers)
        tokens = launch(runner, StepPlan(page_writes=writes, new_jobs=[job], units=units)).tokens
        return [token.token_id for token in tokens]

    alone = drawn(90)
    monkeypatch.setattr(gpu.prefill.unit_attention, "has_flash", lambda query: True)
    monkeypatch.setattr(gpu.prefill.unit_attention, "packed_prefill_attention", packed_reference)
    assert drawn(70) == drawn(90) == alone
    assert len(alone) == 2


def test_prompts_behind_those_that_are_cut_out_are_packed_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their first unit is of as many tokens as the last one before, which was of other prompts."""
    monkeypatch.setattr(gpu.prefill.unit_attention, "has_flash", lambda query: True)
    monkeypatch.setattr(gpu.prefill.unit_attention, "packed_prefill_attention", packed_reference)
    asks = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    prompts = [
        PrefillPrompt(slot, document_prompt(n, n)[:n], 0, n, asks, "exact") for slot, n in enumerate((40, 50, 30, 60))
    ]
    told = []
    for num_units in (0, 1):  # before the first two prompts leave
        runner = reference_runner("float32", "cpu", max_running=4, num_pages=40, max_context_tokens=256)
        pages = Pages(runner)
        writes = [pages.take(prompt.slot, len(prompt.token_ids) + 1) for prompt in prompts]
        whole, rest = PrefillJob(1, prompts), PrefillJob(1, prompts[2:])
        launch(runner, StepPlan(page_writes=writes, new_jobs=[whole], units=layer_units(whole, 70)[:num_units]))
        told.append(launch(runner, StepPlan(released_slots=[0, 1], units=layer_units(rest, 70))))
    for slot in (2, 3):
        wanted, got = ([entry.logprob for entry in one.prompt_logprobs[slot]] for one in told)
        np.testing.assert_allclose(got, wanted, atol=CHUNKING_LOGPROB_ATOL, rtol=0)


def packed_reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, packing: Packing,
                     scale: float, window: int | None = None, kernel: Whole = "flash") -> Attended:  # fmt: skip
    assert window is None
    queries, keys = (begins.tolist() for begins in (packing.query_begins, packing.key_begins))
    attended = []
    for at in range(len(queries) - 1):
        own = slice(queries[at], queries[at + 1])
        rows = [one[keys[at] : keys[at + 1]].transpose(0, 1) for one in (key, value)]
        alone = prefill_attention_reference(query[own], *rows, scale)
        attended.append(Attended(alone.out.to(query.dtype), alone.lse))
    return joined(attended)


def prompt_logprobs() -> dict[int, np.ndarray]:
    """Of all prompts of one job, by slot, and in the end what those drew that go on from the first one's pages."""
    runner = reference_runner("bfloat16", "cuda", max_running=8, num_pages=200, max_context_tokens=1024)
    pages = Pages(runner)
    prompts = [document_prompt(length, length) for length in LENGTHS]
    asks = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    job = PrefillJob(1, [PrefillPrompt(slot, ids, 0, len(ids), asks, "exact") for slot, ids in enumerate(prompts)])
    writes = [pages.take(slot, len(ids) + 1) for slot, ids in enumerate(prompts)]
    result = launch(runner, StepPlan(page_writes=writes, new_jobs=[job], units=layer_units(job, 170, NUM_LAYERS)))
    told = {slot: np.array([entry.logprob for entry in entries]) for slot, entries in result.prompt_logprobs.items()}
    shared = writes[0].page_ids[:6]
    draws = SamplingParams(temperature=0.0, num_logprobs=0)
    later = [np.concatenate([prompts[0][:96], document_prompt(length, 50 + length)]) for length in (20, 60)]
    after = PrefillJob(2, [PrefillPrompt(5 + i, ids, 96, len(ids), draws, "exact") for i, ids in enumerate(later)])
    writes = [PageWrite(5 + i, 0, shared) for i in range(2)]
    writes += [pages.take(5 + i, len(ids) + 1, first_page=6) for i, ids in enumerate(later)]
    result = launch(runner, StepPlan(page_writes=writes, new_jobs=[after], units=layer_units(after, 500, NUM_LAYERS)))
    told[-1] = np.array([token.logprob.logprob for token in result.tokens if token.logprob is not None])
    assert len(told[-1]) == 2
    return told


def launch(runner: Runner, plan: StepPlan) -> StepResult:
    return runner.launch(plan).collect()
