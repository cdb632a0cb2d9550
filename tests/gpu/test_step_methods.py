"""A method's part in a step: what it changes before attention is what is read, and it sees all of it afterwards.

The toy method takes some of a row's heads off the host and reads their skipped range on the device, where the oracle's
pages still have it: so every cell is read once, by another way for each head, and the logits stay those of the oracle.
"""

import pytest
import torch

from gpu.methods.device_side import DeviceSide, LayerReads, Site
from gpu.methods.method import Method, ProfilePart
from gpu.operations.decode_attention.paged_decode_attention import DevicePartials
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import NUM_HEADS, NUM_KV_HEADS, Twins, check_steps, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32
from transfer.partial import CoverageError, Partial
from transfer.tier_shape import BLOCK_TOKENS


class Toy(DeviceSide):
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
        if reads.reads_host and self.unasked:
            reads.wanted = torch.ones(reads.query.shape[:2], dtype=torch.uint8)
            reads.wanted[:, : self.unasked] = 0

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: list[Partial]) -> None:
        assert on_device.far is not None
        nothing = all(bool(partial.lse[:, : self.unasked].isneginf().all()) for partial in filled)
        self.seen.append((reads.reads_host, len(filled), nothing))


class Excluding(DeviceSide):
    """Takes one block of every run off the host, where the exchange slot has bits for that."""

    def __init__(self, block: int) -> None:
        self.block = block
        self.has_bits = False
        self.covered: list[int] = []

    def before(self, reads: LayerReads) -> None:
        if reads.reads_host and self.has_bits:
            reads.excluded = torch.full((len(reads.query), NUM_KV_HEADS, 1), 1 << self.block, dtype=torch.int32)

    def after(self, reads: LayerReads, on_device: DevicePartials, filled: list[Partial]) -> None:
        for partial in filled if self.has_bits else ():
            self.covered += partial.covered.unique().tolist()


class ToyMethod(Method):
    name, summary, device_side = "toy", "", __name__


def with_method(side: DeviceSide, check_coverage: bool = False) -> Twins:
    """The runner that offloads serves one method more."""
    side.model_dump = lambda **_: {}  # as settings have, which it stands for
    return Twins(check_coverage=check_coverage, more_parts=[ProfilePart(ToyMethod(), side)])


def make_device_side(settings: DeviceSide, site: Site) -> DeviceSide:
    """The toy's settings are what it does."""
    assert site.tier_shape is not None
    return settings


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
    assert furthest(twins, [0]) > HOP_LOGITS_FLOAT32  # nobody else read their skipped ranges


@pytest.mark.parametrize("block", [0, 3])
def test_blocks_that_a_method_excludes_are_not_covered(block: int) -> None:
    method = Excluding(block)
    twins = with_method(method, check_coverage=True)
    for exchange in twins.offloading.decode_steps.host_reader.exchanges:
        exchange.slot.excluded = torch.zeros(len(exchange.slot.flags), NUM_KV_HEADS, 1, dtype=torch.int32)
    method.has_bits = True
    twins.prefill([document_prompt(300, 1)])
    with pytest.raises(CoverageError, match=r"layer 1, request of slot 0, head 0: resident 96, host 192 = 288 tokens"):
        twins.step([0])
    assert method.covered == [208 - BLOCK_TOKENS], "of each head"
