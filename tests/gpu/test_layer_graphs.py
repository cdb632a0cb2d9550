"""Layers of short prefill units by graphs give what they give kernel by kernel.

On the CPU a stand-in for a graph runs its work again, so that buffers, sizes and padding are seen there, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from bench.decode_loop import build_runner
from gpu.layers import delta_layers
from gpu.model.architecture import named_shape
from gpu.model.matrix_formats import rounded
from gpu.operations.linear import packed_linear
from gpu.operations.recurrent.delta_prefill import Span, run_spans_reference
from gpu.prefill import layer_graphs
from gpu.prefill.graph_arrays import captured_columns, graph_arrays, layers_in_graphs
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import PageWrite, PrefillJob, PrefillPrompt, StepPlan, WindowWrite
from gpu.weights.drawing import random_weights
from gpu.weights.matrix import PackedMatrix
from tests.gpu.live_bytes import LiveBytes
from tests.gpu.poison import poison_buffers, poison_pool
from tests.gpu.reference_model import layer_units
from tests.gpu.test_memory_peaks import held_tensors

SIZES = (8, 32, 64)
PLAIN = ["tiny", "tiny int4", "tiny-qwen3-moe", "tiny-gpt-oss", "tiny-gemma3", "tiny-gemma4", "tiny-ministral3"]
HYBRIDS = ["tiny-qwen3.5", "tiny-qwen3.5 int4", "tiny-qwen3-next", "tiny-nemotron-h", "tiny-lfm2"]
NAMES = [*PLAIN, *HYBRIDS]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
PAGE_TOKENS, CONTEXT, SLOTS = 16, 128, 4
CPU_ATOL, BF16_ATOL = 2e-4, 0.15  # of log probabilities
# Lengths of a job's prompts, and the most tokens of its units: padded, packed, in chunks with a past, the whole of a
# size, one token, and more than any graph has.
JOBS: list[tuple[list[int], int]] = [([5], 64), ([40, 20], 64), ([50], 20), ([32], 32), ([9, 1], 9), ([90], 90)]


@dataclass
class Again:
    """A graph that runs its work again, and counts how often."""

    work: Callable[[], object]
    count: int = 0

    def replay(self) -> None:
        self.count += 1
        self.work()


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> list[Again]:
    """On the CPU, where graphs have no pool, they are stand-ins, which are listed here."""
    made: list[Again] = []
    on_card = layer_graphs.record

    def record(work: Callable[[], object], pool: Any) -> tuple[Any, Any]:
        if pool is not None:
            return on_card(work, pool)
        made.append(Again(work))
        work()
        return made[-1], None

    monkeypatch.setattr(layer_graphs, "record", record)
    return made


def capture(runner: Runner, sizes: Sequence[int] = SIZES) -> None:
    """Every graph is faster."""
    graphs = runner._prefill._graphs
    runner._prefill.capture(sizes, lambda num_tokens: 1.0 if num_tokens <= graphs.most_tokens else 2.0)


def runner_of(name: str, device: str) -> Runner:
    shape_name, _, asked = name.partition(" ")
    shape = named_shape(shape_name)
    shape = rounded(shape, asked, "weights") if asked else shape
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    weights = random_weights(shape, 5, dtype, torch.device(device), lambda fraction: None)
    return build_runner(shape, weights, SLOTS, CONTEXT, dtype, torch.device(device))


def logprobs(runner: Runner, lengths: list[int], chunk_tokens: int) -> list[np.ndarray]:
    """Of all tokens of each prompt, drawn by its place."""
    asks = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    draw, pages = np.random.default_rng(sum(lengths)), -(-CONTEXT // PAGE_TOKENS)
    prompts = [
        PrefillPrompt(slot, draw.integers(0, 200, length, dtype=np.int32), 0, length, asks, "exact")
        for slot, length in enumerate(lengths)
    ]
    job, has_windows = PrefillJob(1, prompts), runner.pool.windows.shape.count > 0
    plan = StepPlan(
        page_writes=[PageWrite(slot, 0, list(range(slot * pages, (slot + 1) * pages))) for slot in range(len(lengths))],
        window_writes=[WindowWrite(slot, None, slot) for slot in range(len(lengths)) if has_windows],
        new_jobs=[job],
        units=layer_units(job, chunk_tokens, runner.architecture.num_layers),
    )
    told = runner.launch(plan).collect().prompt_logprobs
    runner.launch(StepPlan(released_slots=list(range(len(lengths))))).collect()
    return [np.array([entry.logprob for entry in told[slot]]) for slot in range(len(lengths))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", NAMES)
def test_prompts_by_graphs_are_told_what_they_are_kernel_by_kernel(
    name: str, device: str, stand_ins: list[Again]
) -> None:
    runner = runner_of(name, device)
    wanted = [logprobs(runner, *job) for job in JOBS]
    assert not runner._prefill._graphs.most_tokens
    capture(runner)
    assert runner._prefill._graphs.most_tokens == max(SIZES)
    assert len(stand_ins) in (0, 2 * len(SIZES) * len(layers_in_graphs(runner.architecture)))
    poison_buffers(runner._prefill._graphs)
    for job, known in zip(JOBS, wanted, strict=True):
        for got, own in zip(logprobs(runner, *job), known, strict=True):
            assert np.isfinite(own).all()
            np.testing.assert_allclose(got, own, atol=CPU_ATOL if device == "cpu" else BF16_ATOL, rtol=0)
    assert device == "cuda" or all(graph.count for graph in stand_ins)


def test_graphs_hold_all_layers_of_a_hybrid_but_those_that_are_an_mlp_alone() -> None:
    assert layers_in_graphs(named_shape("tiny-qwen3.5")) == list(range(named_shape("tiny-qwen3.5").num_layers))
    shape = named_shape("tiny-nemotron-h")
    mixers = [layer for layer, spec in enumerate(shape.layers) if spec.has_mixer]
    assert 0 < len(mixers) < shape.num_layers
    assert layers_in_graphs(shape) == mixers


def test_a_units_spans_are_planned_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a layer has several units, which take turns."""
    planned: list[tuple[Span, ...]] = []

    def plan(spans: tuple[Span, ...], ring_length: int, device: torch.device) -> tuple[Span, ...]:
        planned.append(spans)
        return spans

    monkeypatch.setattr(delta_layers, "plan_spans", plan)
    monkeypatch.setattr(delta_layers, "delta_prefill", run_spans_reference)
    runner = runner_of("tiny-qwen3.5", "cpu")
    wanted = logprobs(runner, [50], 20)
    assert not planned
    assert runner._prefill.decoder.delta is not None
    assert len(runner._prefill.decoder.delta.states.layers) > 1
    runner._prefill.decoder.delta._stacked = ()  # as if there were kernels
    np.testing.assert_array_equal(logprobs(runner, [50], 20), wanted)
    assert [(spans[0].first, spans[-1].end) for spans in planned] == [(0, 20), (20, 20), (40, 10)]


def test_jobs_that_take_turns_keep_their_own_hidden_states(stand_ins: list[Again]) -> None:
    """Both by graphs, layer by layer."""
    runner = runner_of("tiny", "cpu")
    asks = SamplingParams(temperature=0.0, num_prompt_logprobs=0)
    prompts = [
        PrefillPrompt(slot, np.arange(3 + slot, 3 + slot + length, dtype=np.int32), 0, length, asks, "exact")
        for slot, length in enumerate((30, 8))
    ]
    jobs = [PrefillJob(number, [prompt]) for number, prompt in enumerate(prompts)]
    writes = [PageWrite(0, 0, [0, 1]), PageWrite(1, 0, [2])]
    units = [layer_units(job, 64, runner.architecture.num_layers) for job in jobs]

    def told(in_turns: bool) -> dict[int, list[float]]:
        order = [unit for pair in zip(*units, strict=True) for unit in pair] if in_turns else [*units[0], *units[1]]
        found = runner.launch(StepPlan(page_writes=writes, new_jobs=jobs, units=order)).collect().prompt_logprobs
        runner.launch(StepPlan(released_slots=[0, 1])).collect()
        return {slot: [entry.logprob for entry in entries] for slot, entries in found.items()}

    wanted = told(in_turns=False)
    capture(runner)
    for in_turns in (False, True):
        got = told(in_turns)
        for slot in wanted:
            np.testing.assert_allclose(got[slot], wanted[slot], atol=CPU_ATOL, rtol=0)


def test_rows_behind_a_units_tokens_write_no_keys(stand_ins: list[Again]) -> None:
    runner = runner_of("tiny", "cpu")
    capture(runner)
    logprobs(runner, [64], 64)  # fills all rows of the largest size
    poison_pool(runner.pool)
    logprobs(runner, [3], 64)
    written = torch.isfinite(runner.pool.key_pages[1]).flatten(2).all(2).any(1)
    assert written.nonzero().flatten().tolist() == []
    assert torch.isfinite(runner.pool.key_pages[1][0, :, :3]).all()
    assert not torch.isfinite(runner.pool.key_pages[1][0, :, 3:]).any()


def test_a_size_that_is_not_faster_is_left_to_launching(
    stand_ins: list[Again], caplog: pytest.LogCaptureFixture
) -> None:
    """What is compared is the shortest prompt that would take the graph, and one of the whole size, with it and
    without. A size that is faster for the latter alone serves it alone, as all units of long prompts but the last.
    """
    told = {1: [3.0, 1.0], 8: [3.0, 1.0], 9: [2.0, 2.5, 2.0, 2.5], 32: [3.0, 3.0], 64: [5.0, 4.0]}
    runner = runner_of("tiny", "cpu")
    with caplog.at_level("INFO"):
        runner._prefill.capture(SIZES, lambda num_tokens: told[num_tokens].pop(0))
    graphs = runner._prefill._graphs
    assert not any(told.values())
    covered = [graphs.covers(0, num_tokens, None) for num_tokens in (0, 1, 8, 9, 63, 64, 65)]
    assert covered == [False, True, True, False, False, True, False]
    assert {size for _, size in graphs._layers} == {8, 64}
    line = caplog.messages[-1]
    assert "8 for units from 1 tokens on (1: 1000.0 for 3000.0 ms" in line
    assert "32 dropped, no faster than launching (9: 2500.0 for 2000.0 ms" in line
    assert "64 for units from 64 tokens on" in line


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("share", [0.0, 0.6, 1.0])
def test_graphs_read_matrices_that_are_widened_in_front_of_them(
    share: float, device: str, stand_ins: list[Again], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether none, some or all of a layer's have places of their own."""
    monkeypatch.setattr(packed_linear, "most_multiplied", lambda packed: 0)
    monkeypatch.setattr(packed_linear, "MOST_PACKED_TOKENS", 1)  # logits are made of so many rows at once
    runner = runner_of("tiny-qwen3.5 int4", device)
    widened, matrices = runner._prefill.decoder.projections.widened, runner._prefill.decoder.projections._matrices
    layers = [[one.packed for one in layer.values() if isinstance(one, PackedMatrix)] for layer in matrices]
    sizes = [[one.rows * one.inner * one.dtype.itemsize for one in layer] for layer in layers]
    widened.most_bytes = int(share * max(map(sum, sizes)))
    widened._places, widened._memory = {}, None
    for layer in layers:
        widened.lay_out(layer)
    owns = [place.is_own for place in widened._places.values()]
    assert (any(owns), all(owns)) == {0.0: (False, True), 0.6: (True, False), 1.0: (True, True)}[share]
    wanted = [logprobs(runner, *job) for job in JOBS]
    capture(runner)
    for job, known in zip([*JOBS, *JOBS[::-1]], [*wanted, *wanted[::-1]], strict=True):
        for got, own in zip(logprobs(runner, *job), known, strict=True):
            np.testing.assert_allclose(got, own, atol=CPU_ATOL if device == "cpu" else BF16_ATOL, rtol=0)


@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-mixtral"])
def test_captured_layers_hold_no_more_than_is_planned(name: str, stand_ins: list[Again]) -> None:
    runner, tokens = runner_of(name, "cpu"), 64
    graphs, architecture = runner._prefill._graphs, runner.architecture
    capture(runner, [tokens])
    known = [one for part in (graphs, runner.pool) for one in vars(part).values() if isinstance(one, torch.Tensor)]
    for layer in layers_in_graphs(architecture):
        captured = graphs._layers[layer, tokens]
        with LiveBytes([*known, *held_tensors(runner.weights), *runner.pool.arenas]) as live:
            captured.before.graph.replay()
            captured.behind.graph.replay()
        planned = 4 * tokens * captured_columns(architecture, architecture.layers[layer])
        assert live.peak <= planned, (layer, live.peak / planned)


def test_no_size_and_no_plain_layer_means_no_graphs(stand_ins: list[Again]) -> None:
    runner = runner_of("tiny", "cpu")
    capture(runner, [])
    assert not runner._prefill._graphs.covers(0, 1, None)
    assert layers_in_graphs(named_shape("tiny-glm4-moe-lite")) == []  # it attends to latents
    assert not stand_ins


def test_buffers_are_as_wide_as_the_widest_layer() -> None:
    shape = named_shape("tiny-gemma4")
    arrays = graph_arrays(shape, 64, 2)
    widest = max(shape.heads_of(spec).dim for spec in shape.layer_pattern)
    assert arrays["between"].shape == (64, 3 * shape.num_heads * widest)
    assert arrays["wide"].shape[0] == 0
    assert graph_arrays(named_shape("tiny-gpt-oss"), 64, 2)["wide"].shape[0] == 64
