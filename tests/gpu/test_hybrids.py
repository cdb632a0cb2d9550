"""Models with recurrent layers: transformers' text behind any prompt, and states that are nobody else's."""

import numpy as np
import pytest
import torch

from gpu.model.architecture import ModelError, parse_architecture, shape_with_rope
from gpu.model.spec import NO_ROTATION, Recurrent
from gpu.operations.recurrent.delta_prefill import Span, delta_prefill, plan_spans
from gpu.operations.recurrent.state_arrays import segment_bytes
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import (
    DecodeGroup,
    PageWrite,
    PrefillJob,
    PrefillPrompt,
    PrefillUnit,
    StepPlan,
    WindowBranch,
    WindowWrite,
)
from tests.gpu.family_checkpoints import (
    CHUNK_TOKENS,
    CONFIGS,
    PAGE_TOKENS,
    SIZES,
    checkpoint,
    draw_prompt,
    generate,
    load,
)
from tests.gpu.test_families import off
from tests.gpu.test_kernels_recurrent import draw_weights, new_states
from tests.scheduler.test_states_of_a_model import converse, make_engine
from tests.tolerances import FAMILY_LOGITS

HYBRIDS = ["qwen3_5", "lfm2", "nemotron_h"]  # a kind of state each; `test_families` has them all, behind 5 and 200
LENGTHS = [1, 63, 64, 65, 3000]
GREEDY = SamplingParams(temperature=0.0)
PAGES = 40


@pytest.mark.parametrize(
    "name", [*HYBRIDS, *(pytest.param(name, marks=pytest.mark.long) for name in ("qwen3_next", "qwen3_5_moe"))]
)
@pytest.mark.parametrize("length", LENGTHS)
def test_64_greedy_tokens_behind_any_prompt_are_those_of_transformers(name: str, length: int) -> None:
    known, prompt = checkpoint(name), draw_prompt(length)
    tokens, logits = generate(load(known.folder), prompt, 64)
    wanted = known.logits(np.concatenate([prompt, tokens[:-1]]))[length - 1 :]
    assert off(logits, wanted) < FAMILY_LOGITS
    assert wanted.argmax(-1).tolist() == tokens


def prefill(runner: Runner, prompts: dict[int, np.ndarray], windows: list[WindowWrite], begin: int = 0,
            cut: int = CHUNK_TOKENS, branches: tuple[WindowBranch, ...] = ()) -> list[int]:  # fmt: skip
    """The tokens that prompts of slots draw, packed; behind `begin` tokens, whose pages are slot 0's."""
    own = [PageWrite(slot, 0, range(slot * PAGES, (slot + 1) * PAGES)) for slot in prompts]
    shared = [PageWrite(slot, 0, range(begin // PAGE_TOKENS)) for slot in prompts if begin]
    job = PrefillJob(0, [PrefillPrompt(slot, prompt, begin, len(prompt), GREEDY, "exact", branches=branches)
                         for slot, prompt in prompts.items()])  # fmt: skip
    units = [
        PrefillUnit(0, layer, first, min(first + cut, job.num_tokens))
        for layer in range(runner.architecture.num_layers)
        for first in range(0, job.num_tokens, cut)
    ]
    plan = StepPlan(page_writes=own + shared, window_writes=windows, new_jobs=[job], units=units)
    return [token.token_id for token in runner.launch(plan).collect().tokens]


def decode(runner: Runner, lengths: dict[int, int], steps: int) -> dict[int, list[int]]:
    tokens: dict[int, list[int]] = {slot: [] for slot in lengths}
    for step in range(steps):
        group = DecodeGroup(list(lengths), [length + step for length in lengths.values()], [1 + step] * len(lengths))
        for slot, token in zip(lengths, runner.launch(StepPlan(decode=[group])).collect().tokens, strict=True):
            tokens[slot].append(token.token_id)
    return tokens


@pytest.mark.parametrize("cut", [1000, 128, 37])
def test_packed_prompts_in_units_of_any_size_and_rows_side_by_side_are_each_ones_own(cut: int) -> None:
    known = checkpoint("qwen3_5")
    alone = [generate(load(known.folder), draw_prompt(length), 12)[0] for length in (150, 81)]
    runner = load(known.folder, num_states=4)
    windows = [WindowWrite(3, None, 0), WindowWrite(1, None, 1)]
    first = prefill(runner, {0: draw_prompt(150), 1: draw_prompt(81)}, windows, cut=cut)
    rest = decode(runner, {0: 150, 1: 81}, 12)
    assert [[token, *rest[slot]] for slot, token in enumerate(first)] == alone


def test_a_prompt_goes_on_behind_a_copy_and_a_state_that_is_stale_is_seen() -> None:
    """A branch of the first prompt is the second one's state, whose slot is given a copy; power: the state behind the
    whole first prompt in its place.
    """
    known, front = checkpoint("qwen3_5_moe"), draw_prompt(96)
    first = np.concatenate([front, draw_prompt(50)])
    second = np.concatenate([front, draw_prompt(31)])
    wanted = generate(load(known.folder), second, 8)[0]
    texts = []
    for source in (2, 0):
        runner = load(known.folder, num_states=4)
        prefill(runner, {0: first}, [WindowWrite(0, None, 0)], branches=(WindowBranch(2, 96), WindowBranch(3, 128)))
        begun = prefill(runner, {1: second}, [WindowWrite(1, source, 1)], begin=96)
        texts.append([*begun, *decode(runner, {1: len(second)}, 8)[1]])
        states = runner.pool.states
        assert states is not None
        assert not states.arenas[0][:, 2:].isnan().any()
    assert texts[0] == wanted
    assert texts[1] != wanted


def test_a_slots_next_prompt_begins_anew_whatever_its_state_has() -> None:
    known, prompt = checkpoint("qwen3_next"), draw_prompt(70)
    runner = load(known.folder)
    texts = []
    for _ in range(2):
        texts.append(generate(runner, prompt, 6)[0])
        states = runner.pool.states
        assert states is not None
        for arena in states.arenas:
            arena.fill_(torch.nan)
    assert texts[0] == texts[1]
    with pytest.raises(ValueError, match=r"states: asked \[9\], have 2"):
        runner.launch(StepPlan(window_writes=[WindowWrite(9, None, 0)]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 4}, "layer_types has .* alone; wanted both kinds"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types is .*; wanted 4 of 'linear_attention', "),
        ({"linear_num_value_heads": 3}, "linear_num_value_heads is 3 over 2, linear_num_key_heads; wanted a multiple"),
        ({"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim is 9; served: 2 to 4"),
        ({"attn_output_gate": False}, "attn_output_gate is False; served: True"),
    ],
)
def test_layers_that_are_not_computed_are_refused_by_name(change: dict, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        parse_architecture(SIZES | CONFIGS["qwen3_5"] | change, "test", "config.json")


def test_what_transformers_writes_of_steps_without_a_limit_is_read() -> None:
    limits = [0.0, {"__float__": "Infinity"}]
    shape = parse_architecture(SIZES | CONFIGS["granitemoehybrid"] | {"time_step_limit": limits}, "test", "config.json")
    assert shape.recurrent is not None
    assert shape.recurrent.is_mamba


def test_a_nemotron_h_has_as_many_positions_as_a_person_says_and_rotates_nothing() -> None:
    longer = {"rope_type": "default", "max_position_embeddings": 1_048_576}
    shape = shape_with_rope("tiny-nemotron-h", longer)
    assert (shape.max_context_tokens, shape.rope) == (1_048_576, NO_ROTATION)
    with pytest.raises(ModelError, match="rope scaling 'yarn'; a Nemotron-H rotates nothing"):
        shape_with_rope("tiny-nemotron-h", {"rope_type": "yarn", "factor": 4.0})


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*HYBRIDS, "qwen3_next", "qwen3_5_moe", "granitemoehybrid"])
def test_an_engine_with_graphs_gives_the_text_of_the_cpu_with_snapshots_and_without(name: str) -> None:
    """In float32: turns, forks and a turn taken back, through captured steps and states that are copied. Histories are
    the CPU's, so that one near-tie changes one text.
    """
    folder = checkpoint(name, vocab_size=1024, head_dim=64).folder  # kernels serve no heads of 32
    cold, _ = converse(make_engine(prefix_cache=False, folder=folder))
    for prefix_cache in (False, True):
        engine = make_engine(prefix_cache=prefix_cache, folder=folder, device="cuda")
        texts, cached = converse(engine, cold)
        engine.shutdown()
        parted = [next((at for at, pair in enumerate(zip(*both, strict=True)) if len(set(pair)) > 1), None)
                  for both in zip(texts, cold, strict=True)]  # fmt: skip
        assert sum(at is None for at in parted) >= len(parted) - 2, f"parted at {parted}"
        assert any(cached) is prefix_cache


@pytest.mark.gpu
def test_a_long_prompts_layers_take_no_more_memory_than_a_short_ones() -> None:
    """Of one recurrent layer: what is allocated on the way, beside the rows that go in and come out."""
    own, dtype, peaks = Recurrent(16, 48, 128, 128, 4), torch.bfloat16, []
    weights = draw_weights(own, dtype, "cuda")
    held = new_states(own, 1, dtype, "cuda")
    mixed, gates = (torch.randn(2048, width, dtype=dtype, device="cuda")
                    for width in (own.conv_width + own.value_width, 2 * own.value_heads))  # fmt: skip
    for tokens in (4096, 262_144):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for begin in range(0, tokens, 2048):
            planned = plan_spans([Span(0, 0, 2048, begin, 0)], held.rings.shape[1], mixed.device)
            delta_prefill(mixed, gates, weights, own, 1e-6, held, planned)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        assert not held.states.isnan().any()
    assert peaks[1] <= 1.05 * peaks[0]
    print("PEAK", peaks, segment_bytes(own, 2048, has_kernels=True))
    assert peaks[0] <= segment_bytes(own, 2048, has_kernels=True) + 2 * 2048 * own.value_width * 2
