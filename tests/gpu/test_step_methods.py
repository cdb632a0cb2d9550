"""A method's part in a step: what it changes before attention is what is read, and it sees all of it afterwards.

The toy method takes some of a row's heads off the host and reads their hole on the device, where the oracle's pages
still have it: so every cell is read once, by another way for each head, and the logits stay those of the oracle.
"""

import pytest
import torch

from gpu.decode.method import LayerReads, StepMethod
from gpu.kernels.paged_decode_attention import Reading
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import NUM_HEADS, Twins, check_steps, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.partial import Partial

PAGE = 16


class Toy(StepMethod):
    """Moves the cut of every head back by `far` cells, so that as many are far, and asks the host for no head of the
    first `unasked`."""

    def __init__(self, far: int, unasked: int = 0) -> None:
        self.far, self.unasked = far, unasked
        self.seen: list[tuple[bool, int, bool]] = []

    def before(self, reads: LayerReads) -> None:
        assert reads.pre_rope_query.shape == reads.query.shape
        contexts = reads.rows.context_lens[None, :, None]
        bounds = reads.bounds if reads.bounds is not None else torch.zeros(1, 1, 1, dtype=torch.int32).expand(3, 1, 1)
        bounds = bounds.expand(3, len(reads.query), NUM_HEADS).clone()
        bounds[2] = torch.minimum(bounds[2] + self.far, contexts[0])
        reads.bounds, reads.has_far = bounds, True
        if reads.asks and self.unasked:
            reads.wanted = torch.ones(reads.query.shape[:2], dtype=torch.uint8)
            reads.wanted[:, : self.unasked] = 0

    def after(self, reads: LayerReads, on_device: Reading, filled: list[Partial]) -> None:
        assert on_device.far is not None
        nothing = all(bool(partial.lse[:, : self.unasked].isneginf().all()) for partial in filled)
        self.seen.append((reads.asks, len(filled), nothing))


def with_method(method: Toy) -> Twins:
    twins = Twins()
    loop = twins.deposits.decode_steps.loop
    object.__setattr__(loop, "methods", (*loop.methods, method))
    object.__setattr__(loop, "workspace", loop.workspace)
    twins.deposits.decode_steps._compiled = None
    return twins


def test_what_a_method_calls_far_is_merged_with_near_and_with_what_the_host_fills() -> None:
    method = Toy(far=37)
    twins = with_method(method)
    twins.prefill([document_prompt(300, 1), document_prompt(40, 2)])
    check_steps(twins, [0, 1], 8)
    assert {(asks, count) for asks, count, _ in method.seen} == {(True, 1), (False, 0)}


def test_heads_that_a_method_does_not_want_get_nothing_from_the_host() -> None:
    method = Toy(far=0, unasked=3)
    twins = with_method(method)
    twins.prefill([document_prompt(300, 1)])
    twins.step([0])
    assert all(nothing for asks, _, nothing in method.seen if asks)
    assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32  # nobody else read their holes


@pytest.mark.parametrize("block", [0, 3])
def test_blocks_that_a_method_excludes_are_not_covered(block: int) -> None:
    class Excluding(StepMethod):
        def before(self, reads: LayerReads) -> None:
            if reads.asks:
                reads.excluded = torch.full((len(reads.query), 2, 1), 1 << block, dtype=torch.int32)

        def after(self, reads: LayerReads, on_device: Reading, filled: list[Partial]) -> None:
            counts.extend(partial.covered.unique().tolist() for partial in filled)

    counts: list[list[int]] = []
    twins = Twins(check_coverage=True)
    loop = twins.deposits.decode_steps.loop
    object.__setattr__(loop, "methods", (Excluding(),))
    for exchange in twins.deposits.decode_steps.asking.exchanges:
        exchange.slot.excluded = torch.zeros(len(exchange.slot.flags), 2, 1, dtype=torch.int32)
    twins.prefill([document_prompt(300, 1)])
    result = None
    with pytest.raises(AssertionError, match="coverage: layer 1.*resident"):
        result = twins.step([0])
    assert result is None
    ask = twins.group([0]).asks[0] or None
    assert counts
    assert all(len(one) == 1 for one in counts)
    assert ask is None or counts[0] == [ask.end - ask.begin - PAGE]
