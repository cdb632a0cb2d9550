"""Pages of indexes that sequences with a common front hold together: who fills them, and less which centre."""

import pytest
import torch

from gpu.methods.indexed.upkeep import Upkeep
from gpu.step import RingCopy
from tests.gpu.reference_model import document_prompt
from tests.gpu.test_indexed_serving import FEW, NEVER, ON_CARD, IndexedTwins
from tests.gpu.twin_runners import NUM_KV_HEADS, furthest
from tests.tolerances import HOP_LOGITS_FLOAT32, INDEXED_LOGITS

LONG = document_prompt(1180, 1)
COMMON = 16 + 1024  # tokens of the sink and of one page


def share(twins: IndexedTwins, begin: int = 1170) -> None:
    """Ring 1 begins with the first page of ring 0's index, and goes on in one of its own."""
    first, *_ = twins.side.upkeep.known[0].pages
    twins.assign(1, 1, RingCopy(0, begin, 1200), (first, twins.side.upkeep.known[1].pages[1]), 1)


@pytest.mark.parametrize(("steps_before", "on_card"), [(0, False), (1, True)])
def test_who_begins_alike_is_read_by_one_page_which_whoever_comes_first_has_indexed(
    steps_before: int, on_card: bool
) -> None:
    """Equal sequences have equal logits, though the second one found or left its page to the other, and the centre."""
    few = FEW | (ON_CARD if on_card else {})
    twins = IndexedTwins(few, max_context=2048, **({"offload_block_tokens": NEVER} if on_card else {}))
    if on_card:
        twins.prefill([LONG, LONG])
    else:
        for slot in (0, 1):
            twins.prefill_down(slot, LONG)
    if steps_before:
        assert not twins.step([0]).failures
    share(twins)
    first, second = twins.side.upkeep.known[:2]
    assert second.centre is first.centre
    index = twins.side.index
    if not steps_before:
        check_covered(twins, [1])
        assert second.num_tokens > COMMON > first.num_tokens == 0
    codes = index.codes[:, first.pages[0]].clone()
    assert codes.any()
    check_covered(twins, [0] if not steps_before else [1])
    for _ in range(3):
        check_covered(twins, [0, 1])
        left, right = (twins.logits(slot)[0] for slot in (0, 1))
        assert (left - right).abs().max() < HOP_LOGITS_FLOAT32
    assert torch.equal(codes, index.codes[:, first.pages[0]]), "nobody indexed it again"
    places = slice(0, NUM_KV_HEADS), slice(NUM_KV_HEADS, 2 * NUM_KV_HEADS)
    assert torch.equal(*(index.centres[:, own] for own in places))
    twins.assign(0, 0)
    check_covered(twins, [0, 1])
    assert first.centre is not twins.side.upkeep.known[0].centre


def check_covered(twins: IndexedTwins, slots: list[int]) -> None:
    """Step, in which coverage is checked, and be near the exact logits."""
    assert not twins.step(slots).failures
    assert furthest(twins, slots) < INDEXED_LOGITS


def test_a_centre_that_one_of_two_lacks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = IndexedTwins(FEW, max_context=2048)
    for slot in (0, 1):
        twins.prefill_down(slot, LONG)
    share(twins)
    monkeypatch.setattr(Upkeep, "_share_centre", lambda self, ring: setattr(self.known[ring].centre, "is_known", True))
    twins.step([0])
    twins.step([0, 1])
    twins.step([1])
    left, right = (twins.logits(slot)[0] for slot in (0, 1))
    assert (left - right).abs().max() > 10 * HOP_LOGITS_FLOAT32
