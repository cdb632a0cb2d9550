"""Recurrent layers: chunks are steps, a prompt may be cut anywhere, and the kernel of a step is its reference."""

from dataclasses import fields, replace
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpu.model.spec import Recurrent
from gpu.operations.arguments import INTERPRETED, runs_on_triton
from gpu.operations.recurrent import delta_prefill as delta_prefill_module
from gpu.operations.recurrent.delta_net import LayerStates, RecurrentWeights, run_segment
from gpu.operations.recurrent.delta_prefill import Span, delta_prefill, plan_spans, run_spans_reference
from gpu.operations.recurrent.delta_rule import chunked_delta_rule, delta_rule_reference
from gpu.operations.recurrent.delta_step import (
    delta_commit,
    delta_commit_reference,
    delta_step,
    delta_step_reference,
    stack,
)
from gpu.operations.recurrent.state_arrays import CHUNKS_AT_ONCE, MOST_STEP_ROWS, ring_length
from tests.gpu.kernel_oracles import DEVICES
from transfer.allocation import allocate_empty

EPS = 1e-6
NAMES = ("states", "rings", "drafts")
SMALL = Recurrent(2, 4, 16, 16, 4)
MAMBA = Recurrent(2, 4, 24, 16, 4, kind="mamba2")
SHAPES = [
    replace(SMALL, is_tiled=True), SMALL, Recurrent(1, 3, 24, 20, 4), Recurrent(2, 2, 128, 128, 3),
    MAMBA, Recurrent(1, 3, 64, 20, 3, kind="mamba2"),
]  # fmt: skip


def draw_weights(own: Recurrent, dtype: torch.dtype, device: str = "cpu") -> RecurrentWeights:
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    wide = torch.promote_types(dtype, torch.float32)
    conv = draw(own.conv_width, 1, own.conv_tokens) * 0.5
    numbers = draw(own.value_heads, dtype=wide), draw(own.value_heads, dtype=wide) - 2.0
    found = RecurrentWeights(draw(own.gate_rows, 8), conv, *numbers, draw(own.norm_width) * 0.3 + 1.0)
    if not own.is_mamba:
        return found
    return replace(found, conv_bias=draw(own.conv_width) * 0.3, skip=draw(own.value_heads, dtype=wide))


def widened(weights: RecurrentWeights) -> RecurrentWeights:
    """The same numbers in float64, on the CPU."""
    held = {one.name: getattr(weights, one.name) for one in fields(weights)}
    return RecurrentWeights(**{name: None if one is None else one.double().cpu() for name, one in held.items()})


def draw_rows(
    own: Recurrent, tokens: int, dtype: torch.dtype, device: str = "cpu"
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens)
    mixed = torch.randn(tokens, own.conv_width + own.value_width, generator=generator, dtype=torch.float64)
    gates = torch.randn(tokens, own.gate_rows, generator=generator, dtype=torch.float64)
    return mixed.to(device, dtype), gates.to(device, dtype)


def new_states(own: Recurrent, count: int, dtype: torch.dtype, device: str = "cpu",
               state: torch.dtype | None = None) -> LayerStates:  # fmt: skip
    """Of NaN, which nobody may read."""
    wide = torch.promote_types(dtype, torch.float32) if state is None else state
    states = torch.full((count, own.value_heads, own.key_dim, own.value_dim), torch.nan, dtype=wide, device=device)
    rings = torch.full((count, ring_length(own.conv_tokens), own.conv_width), torch.nan, dtype=dtype, device=device)
    drafts = torch.full((6, MOST_STEP_ROWS - 1, own.gate_rows), torch.nan, dtype=dtype, device=device)
    return LayerStates(states, rings, drafts)


def copy_of(held: LayerStates) -> LayerStates:
    return LayerStates(held.states.clone(), held.rings.clone(), held.drafts.clone())


def plain(mixed: torch.Tensor, gates: torch.Tensor, weights: RecurrentWeights, own: Recurrent) -> torch.Tensor:
    """A prompt from its start in the words of the paper, head by head and token by token."""
    tokens, shared, taps = len(mixed), own.value_heads // own.key_heads, own.conv_tokens
    x, z = mixed[:, : own.conv_width], mixed[:, own.conv_width :]
    convolved = torch.zeros_like(x)
    for token in range(tokens):
        for tap in range(taps):
            if token - taps + 1 + tap >= 0:
                convolved[token] += weights.conv[:, 0, tap] * x[token - taps + 1 + tap]
    if weights.conv_bias is not None:
        convolved = convolved + weights.conv_bias
    convolved = convolved / (1 + torch.exp(-convolved))
    if own.is_mamba:
        return plain_mamba(convolved, z, gates, weights, own)
    out = torch.zeros(tokens, own.value_width, dtype=mixed.dtype)
    for head in range(own.value_heads):
        state = torch.zeros(own.key_dim, own.value_dim, dtype=mixed.dtype)
        key_head = head % own.key_heads if own.is_tiled else head // shared
        at, key_at = key_head * own.key_dim, own.key_width + key_head * own.key_dim
        mine = slice(head * own.value_dim, (head + 1) * own.value_dim)
        for token in range(tokens):
            q, k = convolved[token, at : at + own.key_dim], convolved[token, key_at : key_at + own.key_dim]
            q, k = q / torch.sqrt(q @ q + 1e-6) * own.key_dim**-0.5, k / torch.sqrt(k @ k + 1e-6)
            v = convolved[token, 2 * own.key_width :][mine]
            share = 1 / (1 + torch.exp(-gates[token, head]))
            time = torch.log(1 + torch.exp(gates[token, own.value_heads + head] + weights.time_bias[head]))
            state = torch.exp(-torch.exp(weights.decay[head]) * time) * state
            state = state + share * torch.outer(k, v - k @ state)
            o = q @ state
            z_head = z[token, mine]
            out[token, mine] = weights.norm * o / torch.sqrt((o * o).mean() + EPS) * z_head / (1 + torch.exp(-z_head))
    return out


def plain_mamba(
    convolved: torch.Tensor, z: torch.Tensor, gates: torch.Tensor, weights: RecurrentWeights, own: Recurrent
) -> torch.Tensor:
    """The same of Mamba-2, behind its convolution: each element of a state by itself, and groups normed at the end."""
    out = torch.zeros(len(z), own.value_width, dtype=z.dtype)
    for head in range(own.value_heads):
        group = head // (own.value_heads // own.key_heads)
        state = torch.zeros(own.value_dim, own.key_dim, dtype=z.dtype)
        mine = slice(head * own.value_dim, (head + 1) * own.value_dim)
        for token in range(len(z)):
            c, b = (convolved[token, at : at + own.key_dim]
                    for at in (group * own.key_dim, own.key_width + group * own.key_dim))  # fmt: skip
            x = convolved[token, 2 * own.key_width :][mine]
            time = torch.log(1 + torch.exp(gates[token, head] + weights.time_bias[head]))
            state = torch.exp(-torch.exp(weights.decay[head]) * time) * state + time * torch.outer(x, b)
            out[token, mine] = state @ c + weights.skip[head] * x
    out = out * z / (1 + torch.exp(-z))
    for part in out.chunk(own.key_heads, 1):
        part /= torch.sqrt((part * part).mean(1, keepdim=True) + EPS)
    return out * weights.norm


@pytest.mark.parametrize("own", SHAPES)
@pytest.mark.parametrize("tokens", [1, 3, 63, 64, 65, 200])
def test_chunks_are_steps_and_both_are_the_paper_in_float64(own: Recurrent, tokens: int) -> None:
    weights, (mixed, gates) = draw_weights(own, torch.float64), draw_rows(own, tokens, torch.float64)
    one, other = new_states(own, 2, torch.float64), new_states(own, 2, torch.float64)
    chunked = run_segment(mixed, gates, weights, own, EPS, one, 1, 0)
    stepped = run_segment(mixed, gates, weights, own, EPS, other, 1, 0, is_chunked=False)
    wanted = plain(mixed, gates, weights, own)
    assert (chunked - wanted).abs().max() < 1e-11
    assert (stepped - wanted).abs().max() < 1e-11
    assert (one.states[1] - other.states[1]).abs().max() < 1e-11
    assert torch.equal(one.rings[1], other.rings[1]) or tokens < ring_length(own.conv_tokens)
    assert one.states[0].isnan().all(), "the neighbour's state is nobody's"


@cache
def whole_prompt(own: Recurrent, dtype: torch.dtype) -> tuple[RecurrentWeights, LayerStates, torch.Tensor]:
    """Return weights, and state and outputs of 200 tokens at once."""
    weights, whole = draw_weights(own, dtype), new_states(own, 1, dtype)
    return weights, whole, run_segment(*draw_rows(own, 200, dtype), weights, own, EPS, whole, 0, 0)


@settings(max_examples=6)
@given(cuts=st.sets(st.integers(1, 199), min_size=1, max_size=5))
@example({1})
@example({2, 64})
@example({1, 2, 3, 4, 5})
@example({128, 199})
@pytest.mark.parametrize("own", [SMALL, MAMBA])
def test_a_prompt_that_is_cut_anywhere_has_the_same_state(own: Recurrent, cuts: set[int]) -> None:
    """In float64 to 1e-11; in float32 to 1e-5 of the largest element (5e-7 of a delta net's, 4e-6 of Mamba's were
    seen). Outputs to ten times that.
    """
    for dtype, bound in ((torch.float64, 1e-11), (torch.float32, 1e-5)):
        weights, whole, wanted = whole_prompt(own, dtype)
        (mixed, gates), parts = draw_rows(own, 200, dtype), new_states(own, 1, dtype)
        got = [
            run_segment(mixed[begin:end], gates[begin:end], weights, own, EPS, parts, 0, begin)
            for begin, end in pairwise([0, *sorted(cuts), 200])
        ]
        off = (parts.states - whole.states).abs().max() / whole.states.abs().max()
        assert off < bound
        assert ((torch.cat(got) - wanted).abs() / (1 + wanted.abs())).max() < 10 * bound
        assert torch.equal(parts.rings, whole.rings)


def test_a_decay_that_is_left_out_and_a_share_that_is_one_are_seen() -> None:
    """Power of the comparisons above."""
    own, tokens = SMALL, 100
    generator = torch.Generator().manual_seed(0)
    rows = [torch.randn(tokens, 4, 16, generator=generator, dtype=torch.float64) for _ in range(3)]
    query, key, value = (one / one.norm(dim=2, keepdim=True) for one in rows)
    decay = -torch.rand(tokens, 4, generator=generator, dtype=torch.float64)
    share = torch.rand(tokens, 4, generator=generator, dtype=torch.float64)
    state = torch.randn(4, 16, 16, generator=generator, dtype=torch.float64)
    wanted = delta_rule_reference(query, key, value, decay, share, state)[0]
    assert (chunked_delta_rule(query, key, value, decay, share, state)[0] - wanted).abs().max() < 1e-12
    for change in ((decay * 0, share), (decay, share * 0 + 1), (decay * 1.01, share)):
        assert (chunked_delta_rule(query, key, value, *change, state)[0] - wanted).abs().max() > 1e-4
    assert own.key_dim == 16


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, id="narrow")])
def test_a_step_is_a_prompt_of_one_token_in_place_of_each_slots_state(
    own: Recurrent, dtype: torch.dtype, device: str
) -> None:
    """Rows of a slot follow one another, of another begins a context, and some pad the batch."""
    weights = draw_weights(own, dtype, device)
    slots = torch.tensor([3, 3, 3, -1, 0, 2, -1], dtype=torch.int32, device=device)
    cells = torch.tensor([9, 10, 11, 0, 0, 2, 0], device=device)
    state_of_slot = torch.tensor([4, 0, 1, 2], dtype=torch.int32, device=device)
    mixed, gates = draw_rows(own, len(slots), dtype, device)
    mixed[3], gates[3] = torch.nan, torch.nan
    held = new_states(own, 5, dtype, device)
    for slot, length in ((3, 9), (2, 2)):
        rows = draw_rows(own, length, dtype, device)
        run_segment(*rows, weights, own, EPS, held, int(state_of_slot[slot]), 0)
    other = copy_of(held)
    sure = torch.zeros_like(slots)
    got = delta_step(mixed, gates, weights, own, EPS, held, state_of_slot, slots, cells, sure)
    wanted = delta_step_reference(mixed, gates, weights, own, EPS, other, state_of_slot, slots, cells, sure)
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert got[3].abs().max() == got[6].abs().max() == 0
    assert ((got.float() - wanted.float()).abs() / (1 + wanted.float().abs())).max() < bound
    for number in (1, 2, 4):
        assert (held.states[number] - other.states[number]).abs().max() < 2e-5
    assert torch.equal(held.rings.nan_to_num(7.0), other.rings.nan_to_num(7.0))
    assert held.states[[0, 3]].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [SMALL, MAMBA])
def test_steps_behind_one_another_are_a_prompt(own: Recurrent, device: str) -> None:
    """As many rows at once as a step may have, and one by one: a ring is never overtaken."""
    dtype, tokens = torch.float32, 26 if INTERPRETED else 40
    weights, (mixed, gates) = draw_weights(own, dtype, device), draw_rows(own, tokens, dtype, device)
    held, whole = new_states(own, 1, dtype, device), new_states(own, 1, dtype, device)
    wanted = run_segment(mixed, gates, weights, own, EPS, whole, 0, 0)
    none, got, begin = torch.zeros(1, dtype=torch.int32, device=device), [], 0
    while begin < tokens:
        count = min(MOST_STEP_ROWS if begin % 2 else 1, tokens - begin)
        part = slice(begin, begin + count)
        cells = torch.arange(begin, begin + count, device=device)
        slots = torch.zeros(count, dtype=torch.int32, device=device)
        got.append(
            delta_step(mixed[part], gates[part], weights, own, EPS, held, none, slots, cells, torch.zeros_like(slots))
        )
        begin += count
    assert (torch.cat(got) - wanted).abs().max() < 5e-5
    assert (held.states - whole.states).abs().max() < 4e-6 * whole.states.abs().max()


def spans_of(parts: list[tuple[int, int, int, dict[int, tuple[int, ...]]]]) -> list[Span]:
    """Of (state, tokens, first position, copies by tokens in front): spans of a unit, one part behind another."""
    spans, begin = [], 0
    for number, tokens, first, copies in parts:
        ends = sorted({*copies, tokens})
        for start, end in zip([0, *ends], ends, strict=False):
            own = copies.get(end, ())
            spans.append(Span(number, begin + start, begin + end, first + start, begin, own))
        begin += tokens
    return spans


def cut_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have products of TF32 under the interpreter cut off all but 10 bits of both sides, as tensor cores do."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def cut(numbers: np.ndarray) -> np.ndarray:
        return (np.ascontiguousarray(numbers).view(np.uint32) & np.uint32(0xFFFFE000)).view(np.float32)

    def dot(self: object, a: Any, b: Any, summed: Any, precision: object, most: int) -> Any:
        product = np.matmul(cut(a.data), cut(b.data), dtype=np.float32)
        return TensorHandle(product + summed.data, summed.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", dot)


ONE = [(1, 70, 0, {})]
MANY = [(0, 5, 0, {}), (1, 64, 2, {}), (2, 40, 9, {16: (5,), 35: (6, 7)}), (3, 1, 30, {}), (4, 130, 1, {2: (8,)})]
LONG = [(0, 30, 64, {}), (1, 64 * CHUNKS_AT_ONCE, 3, {64 * 9: (5,)}), (2, 65, 0, {})]


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels of Triton")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("own", "parts"),
    [(SHAPES[0], ONE), (SHAPES[1], MANY), (SHAPES[2], MANY), (SHAPES[3], ONE), (SHAPES[4], MANY), (SHAPES[5], ONE),
     pytest.param(SHAPES[3], MANY, marks=pytest.mark.long), pytest.param(SMALL, LONG, marks=pytest.mark.long)],
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, id="narrow")])
def test_the_kernels_of_prompts_are_the_paper_for_sequences_of_any_length_side_by_side(
    own: Recurrent, parts: list, dtype: torch.dtype, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against spans in float64, of the same rounded numbers: outputs, states and rings of sequences and of copies. What
    nobody wrote is NaN, and stays; what kernels pass to one another is NaN before.
    """
    monkeypatch.setattr(
        delta_prefill_module, "allocate_empty", lambda spec, on: allocate_empty(spec, on).fill_(torch.nan)
    )
    spans = spans_of(parts)
    tokens = spans[-1].end
    weights, (mixed, gates) = draw_weights(own, dtype, device), draw_rows(own, tokens, dtype, device)
    held, exact = new_states(own, 10, dtype, device), new_states(own, 10, torch.float64)
    wide = widened(weights)
    for number, _, first, _ in parts:
        if first:
            rows = draw_rows(own, first, dtype, device)
            run_segment(*rows, weights, own, EPS, held, number, 0)
            run_segment(*(one.double().cpu() for one in rows), wide, own, EPS, exact, number, 0)
    wanted = run_spans_reference(mixed.double().cpu(), gates.double().cpu(), wide, own, EPS, exact, spans)
    planned = plan_spans(spans, held.rings.shape[1], mixed.device)
    is_narrow = dtype == torch.bfloat16
    if INTERPRETED and is_narrow:
        cut_operands(monkeypatch)
    got = delta_prefill(mixed, gates, weights, own, EPS, held, planned)
    bound, state_bound = (2e-2, 5e-3) if is_narrow else (5e-5, 5e-5)
    assert ((got.double().cpu() - wanted).abs() / (1 + wanted.abs())).max() < bound
    written = [*(part[0] for part in parts), *(copy for span in spans for copy in span.copies)]
    off = (held.states.double().cpu() - exact.states)[written].abs().max() / exact.states[written].abs().max()
    assert off < state_bound
    others = [number for number in range(10) if number not in written]
    assert held.states[others].isnan().all()
    assert torch.equal(held.rings.double().cpu().nan_to_num(7.0), exact.rings.nan_to_num(7.0))


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="kernels of Triton")
@pytest.mark.parametrize("device", DEVICES)
def test_a_chunk_of_one_token_again_and_again_is_solved_without_loss(device: str) -> None:
    """Keys that are all the same, shares of one and no decay: I + A is all ones below its diagonal, and sums of its
    powers would cancel to nothing.
    """
    own, dtype, tokens = SMALL, torch.float32, 128
    weights = draw_weights(own, dtype, device)
    mixed, gates = (one[:1].expand(tokens, -1).contiguous() for one in draw_rows(own, 1, dtype, device))
    gates[:, : own.value_heads], gates[:, own.value_heads :] = 9.0, -40.0
    held, exact = new_states(own, 1, dtype, device), new_states(own, 1, torch.float64)
    wide = widened(weights)
    spans = [Span(0, 0, tokens, 0, 0)]
    wanted = run_segment(mixed.double().cpu(), gates.double().cpu(), wide, own, EPS, exact, 0, 0, is_chunked=False)
    got = delta_prefill(mixed, gates, weights, own, EPS, held, plan_spans(spans, held.rings.shape[1], mixed.device))
    assert (got.double().cpu() - wanted).abs().max() < 1e-4
    assert (held.states.double().cpu() - exact.states).abs().max() < 1e-5


DRAFTED = MOST_STEP_ROWS - 1  # tokens of the longest draft


def step_with_drafts(
    own: Recurrent, dtype: torch.dtype, device: str
) -> tuple[RecurrentWeights, LayerStates, dict[int, LayerStates], torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of slot 3 a step has a token and the longest draft, of 0 a token, of 1 two tokens that are known and no draft.
    Returns weights, states behind the step, those behind steps in which so many of the draft are no draft, outputs,
    and the slots' numbers and the states of slots.
    """
    weights = draw_weights(own, dtype, device)
    slots = torch.tensor([0, *[3] * MOST_STEP_ROWS, 1, 1], dtype=torch.int32, device=device)
    drafted = torch.tensor([0, 0, *[1] * DRAFTED, 0, 0], dtype=torch.int32, device=device)
    cells = torch.tensor([0, *range(9, 9 + MOST_STEP_ROWS), 3, 4], device=device)
    state_of_slot = torch.tensor([4, 2, 1, 0], dtype=torch.int32, device=device)
    mixed, gates = draw_rows(own, len(slots), dtype, device)
    held = new_states(own, 5, dtype, device)
    for slot, length in ((3, 9), (1, 3)):
        rows = draw_rows(own, length, dtype, device)
        run_segment(*rows, weights, own, EPS, held, int(state_of_slot[slot]), 0)
    wanted, outs = {}, None
    for count in range(1 + DRAFTED):
        wanted[count] = copy_of(held)
        rows = torch.tensor([row for row in range(len(slots)) if row <= 1 + count or row > 1 + DRAFTED], device=device)
        made = delta_step_reference(
            mixed[rows], gates[rows], weights, own, EPS, wanted[count], state_of_slot, slots[rows], cells[rows],
            torch.zeros_like(slots[rows]),
        )  # fmt: skip
        outs = made if count == DRAFTED else outs
    got = delta_step(mixed, gates, weights, own, EPS, held, state_of_slot, slots, cells, drafted)
    assert outs is not None
    bound = 2e-5 if dtype == torch.float32 else 2e-2
    assert ((got.float() - outs.float()).abs() / (1 + outs.float().abs())).max() < bound, "rows see those in front"
    return weights, held, wanted, state_of_slot, slots, cells


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", SHAPES)
@pytest.mark.parametrize("accepted", range(1 + DRAFTED))
def test_a_state_takes_in_what_is_drawn_of_a_draft_and_nothing_else(own: Recurrent, accepted: int, device: str) -> None:
    """Every length of the longest draft, by the kernel and by its reference; power: one token more or less is seen."""
    dtype = torch.float32
    weights, held, wanted, state_of_slot, _, _ = step_with_drafts(own, dtype, device)
    assert (held.states[[0, 2, 4]] - wanted[0].states[[0, 2, 4]]).abs().max() < 2e-5, "as in front of the draft"
    slots, cells, counts = (torch.tensor(one, device=device) for one in ([0, 3, 1], [0, 9, 4], [0, accepted, 0]))
    plain = copy_of(held)
    delta_commit_reference(weights, own, plain, state_of_slot, slots, cells, counts)
    both = [plain]
    if runs_on_triton(held.states):
        layers = [copy_of(held), held]  # the kernel has all layers at once
        joined = LayerStates(*(torch.stack([getattr(one, name) for one in layers]) for name in NAMES))
        delta_commit(stack([weights, weights]), own, joined, state_of_slot, slots, cells, counts)
        both += [LayerStates(*(getattr(joined, name)[layer] for name in NAMES)) for layer in range(2)]
    for one in both:
        for count, other in wanted.items():
            off = (one.states[[0, 2, 4]] - other.states[[0, 2, 4]]).abs().max()
            assert bool(off < 2e-5) is (count == accepted)
        assert one.states[[1, 3]].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("own", [SMALL, MAMBA])
def test_steps_with_drafts_of_which_any_part_is_drawn_are_a_prompt(own: Recurrent, device: str) -> None:
    """Rejected tokens are in the ring and are never read: the next step's take their places."""
    dtype, tokens = torch.float32, 35 if INTERPRETED else 60
    weights, (mixed, gates) = draw_weights(own, dtype, device), draw_rows(own, tokens, dtype, device)
    wrong = draw_rows(own, 7, dtype, device)
    held, whole = new_states(own, 1, dtype, device), new_states(own, 1, dtype, device)
    wanted = run_segment(mixed, gates, weights, own, EPS, whole, 0, 0)
    none, begin, number = torch.zeros(1, dtype=torch.int32, device=device), 0, 0
    while begin < tokens:
        right = min(number % MOST_STEP_ROWS, tokens - begin - 1)
        rows = [torch.cat([good[begin : begin + 1 + right], bad])[:MOST_STEP_ROWS]
                for good, bad in ((mixed, wrong[0]), (gates, wrong[1]))]  # fmt: skip
        slots = torch.zeros(MOST_STEP_ROWS, dtype=torch.int32, device=device)
        drafted = torch.ones_like(slots)
        drafted[0] = 0
        cells = torch.arange(begin, begin + MOST_STEP_ROWS, device=device)
        made = delta_step(*rows, weights, own, EPS, held, none, slots, cells, drafted)
        assert (made[: 1 + right] - wanted[begin : begin + 1 + right]).abs().max() < 5e-5
        told = torch.zeros(1, dtype=torch.int64, device=device), cells[:1].clone(), torch.tensor([right], device=device)
        if runs_on_triton(held.states):
            joined = LayerStates(*(getattr(held, name)[None] for name in NAMES))
            delta_commit(stack([weights]), own, joined, none, *told)
        else:
            delta_commit_reference(weights, own, held, none, *told)
        begin += 1 + right
        number += 1
    assert (held.states - whole.states).abs().max() < 4e-6 * whole.states.abs().max()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("taps", [2, 3, 4])
def test_short_convolutions_of_steps_and_of_prompts_cut_anywhere_are_the_formula(taps: int, device: str) -> None:
    """c * conv(b * v): rows of several sequences side by side, one that is not in use, rows of a draft that are refused
    and come again as others, and rings of NaN. 300 channels are more than a program has.
    """
    own, tokens = Recurrent(1, 1, 0, 300, taps, kind="short_conv"), 40
    generator = torch.Generator().manual_seed(taps)
    mixed = torch.randn(tokens, 900, generator=generator, dtype=torch.float64)
    conv = torch.randn(300, 1, taps, generator=generator, dtype=torch.float64)
    inputs = mixed[:, :300] * mixed[:, 600:]
    wanted = torch.zeros(tokens, 300, dtype=torch.float64)
    for token in range(tokens):
        for tap in range(min(taps, token + 1)):
            wanted[token] += conv[:, 0, taps - 1 - tap] * inputs[token - tap]
    wanted = (wanted * mixed[:, 300:600]).to(device, torch.float32)
    mixed = mixed.to(device, torch.float32)
    none = torch.zeros(300, 0, device=device)
    weights = RecurrentWeights(none, conv.to(device, torch.float32), none, none, none)
    held = new_states(own, 3, torch.float32, device)
    for begin, end in ((0, 1), (1, 3), (3, 20)):
        made = run_segment(mixed[begin:end], mixed[begin:end, :0], weights, own, EPS, held, 2, begin)
        assert (made - wanted[begin:end]).abs().max() < 1e-5
    state_of_slot = torch.tensor([2, 0], dtype=torch.int32, device=device)
    slots = torch.tensor([-1, 0, 0, 0, 0, 1], dtype=torch.int32, device=device)
    for other, begin in enumerate(range(20, 32, 2)):  # of four rows two are refused
        rows = [0, *range(begin, begin + 4), other]
        step = mixed[rows]
        step[3:5] *= -1.0
        cells = torch.tensor([10**6, *range(begin, begin + 4), other], device=device)
        drafted = torch.tensor([0, 0, 1, 1, 1, 0], dtype=torch.int32, device=device)
        made = delta_step(step, step[:, :0], weights, own, EPS, held, state_of_slot, slots, cells, drafted)
        assert (made[1:3] - wanted[begin : begin + 2]).abs().max() < 1e-5
        assert (made[5] - wanted[other]).abs().max() < 1e-5
        assert not made[0].any()
    assert held.rings[1].isnan().all(), "the neighbour's ring is nobody's"


def test_a_state_in_bf16_is_near_one_in_float32() -> None:
    own, dtype, tokens = SMALL, torch.float32, 60
    weights, (mixed, gates) = draw_weights(own, dtype), draw_rows(own, tokens, dtype)
    held, wanted = new_states(own, 1, dtype, state=torch.bfloat16), new_states(own, 1, dtype)
    none, slots = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    for token in range(tokens):
        row, cells = slice(token, token + 1), torch.tensor([token])
        for one in (held, wanted):
            delta_step(mixed[row], gates[row], weights, own, EPS, one, none, slots, cells, torch.zeros_like(slots))
    off = (held.states.float() - wanted.states).norm() / wanted.states.norm()
    assert 1e-4 < off < 2e-2


def test_another_shape_is_refused_by_name() -> None:
    weights, (mixed, gates) = draw_weights(SMALL, torch.float32), draw_rows(SMALL, 1, torch.float32)
    slots, cells = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int64)
    with pytest.raises(ValueError, match="delta_step: mixed is"):
        delta_step(mixed[:, 1:], gates, weights, SMALL, EPS, new_states(SMALL, 1, torch.float32), slots, slots,
                   cells, slots)  # fmt: skip
    other = replace(SMALL, value_heads=2)
    with pytest.raises(ValueError, match="delta_step: gates is"):
        delta_step(draw_rows(other, 1, torch.float32)[0], gates, weights, other, EPS,
                   new_states(other, 1, torch.float32), slots, slots, cells, slots)  # fmt: skip
