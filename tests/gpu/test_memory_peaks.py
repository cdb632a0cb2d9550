"""What steps hold at once, counted while they run on the CPU, is no more than the plan has for it, and not far less."""

from dataclasses import fields

import numpy as np
import pytest
import torch

from gpu.attention.prefill_query import Attended
from gpu.kv.pool import KvPool, PoolShape
from gpu.kv.windows import WindowShape
from gpu.layers.layer_arrays import activation_bytes
from gpu.memory.demand import Demand
from gpu.model.architecture import named_shape
from gpu.prefill.window_attention import UnitPart, WindowPrefill
from gpu.sampling import logprobs
from gpu.sampling.sampler import Sampler
from gpu.sampling.sampling_arrays import drawing_bytes
from gpu.sampling_params import SamplingParams
from gpu.weights.weights import Weights
from tests.gpu.cpu_decoder import CPU, PAGE_TOKENS, cpu_decoder
from tests.gpu.live_bytes import LiveBytes

ROWS, VOCAB = 16, 100_000
LEAST_SHARE = 0.5  # of what is planned, that is taken


def held_tensors(weights: Weights) -> list[torch.Tensor]:
    parts = [weights, *weights.layers, *(layer.experts for layer in weights.layers if layer.experts is not None)]
    held = [getattr(part, field.name) for part in parts for field in fields(part)]
    return [one for one in held if isinstance(one, torch.Tensor)]


@pytest.mark.parametrize("num_top", [0, 20])
def test_logprobs_take_what_is_planned_for_each_logit(monkeypatch: pytest.MonkeyPatch, num_top: int) -> None:
    monkeypatch.setattr(logprobs, "LOGPROB_LOGITS", ROWS * VOCAB)
    logits = torch.randn(ROWS, VOCAB, dtype=torch.bfloat16)
    with LiveBytes([logits]) as live:
        logprobs.gather_logprobs(logits, torch.zeros(ROWS, dtype=torch.int64), num_top)
    assert live.peak <= drawing_bytes(ROWS, 0, VOCAB)
    assert num_top == 0 or live.peak >= LEAST_SHARE * drawing_bytes(ROWS, 0, VOCAB)


def test_draws_with_all_filters_take_what_is_planned() -> None:
    sampler, params = Sampler(ROWS, VOCAB, CPU), SamplingParams(
        temperature=0.7, top_p=0.9, top_k=50, min_p=0.01, seed=3,
    )  # fmt: skip
    for slot in range(ROWS):
        sampler.assign(slot, params, np.arange(5, dtype=np.int32), np.zeros(0, np.int32))
    logits, table = torch.randn(ROWS, VOCAB), sampler._penalties
    with LiveBytes([logits, table.counts, table.in_prompt]) as live:
        sampler.sample(logits, list(range(ROWS)), [0] * ROWS)
    assert LEAST_SHARE * drawing_bytes(0, ROWS, VOCAB) <= live.peak <= drawing_bytes(0, ROWS, VOCAB)


WIDE, NARROW = torch.float32, torch.bfloat16
LAYERS = [(name, dtype) for name in ("tiny", "tiny-gemma3", "tiny-qwen3") for dtype in (WIDE, NARROW)]


# The CPU's reference of experts widens bfloat16 rows, which no kernel does.
@pytest.mark.parametrize(("name", "dtype"), [*LAYERS, ("tiny-mixtral", WIDE)])
def test_a_layer_takes_no_more_than_its_activations(name: str, dtype: torch.dtype) -> None:
    shape, tokens = named_shape(name), 64
    decoder = cpu_decoder(shape, dtype, num_pages=8, max_slots=1, max_pages=8)
    hidden, positions = torch.randn(tokens, shape.hidden).to(dtype), torch.arange(tokens)
    slots = torch.zeros(tokens, dtype=torch.int32)
    known = [hidden, positions, slots, decoder.cos, decoder.sin, *decoder.pool.arenas]
    known += held_tensors(decoder.weights)
    with LiveBytes(known) as live:
        decoder.layer(0, hidden, positions, slots, lambda query, _: Attended(query.clone(), None))
    planned = activation_bytes(shape, tokens, dtype.itemsize, 0, on_cuda=False)
    assert LEAST_SHARE * planned <= live.peak <= planned


def test_rows_beside_a_window_take_what_is_planned() -> None:
    shape, tokens, pages = named_shape("tiny-gemma3"), 300, 12
    windows = WindowShape(shape.window_layers, 1, pages)
    pool = KvPool(shape, PoolShape(40, (), PAGE_TOKENS, 1, 640, torch.float32, windows), CPU)
    demand = Demand(shape, "cpu", 4, 1, tokens, PAGE_TOKENS, (1,), None, (), window_pages=pages, num_windows=1)
    planned = next(item.bytes for item in demand.fixed_items() if item.name == "windows under prefill")
    with LiveBytes([*pool.arenas, *pool.windows.arenas, pool.windows.page_table]) as live:
        prefill = WindowPrefill(pool, 1.0)
        prefill.pages(tokens)
        own = [rows[0, :, :tokens] for rows in (prefill._keys, prefill._values)]
        seen = prefill._before(shape.window_layers[0], UnitPart(0, 0, tokens, 2 * tokens, None), 129, own)
    assert all(rows.shape[1] >= tokens + 128 for rows in seen)
    assert LEAST_SHARE * planned <= live.peak <= planned
