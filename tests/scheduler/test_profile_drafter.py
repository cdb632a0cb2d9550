"""What is known of drafts that a profile makes: how long they may be, and the chances that they are drawn."""

from types import SimpleNamespace

import pytest

from gpu.config import DraftConfig
from gpu.step import TO_DRAFT
from scheduler.drafts.acceptance import shared_chances
from scheduler.drafts.profile_drafter import TRIED_AGAIN, ProfileDrafter


def sequence_of(num_left: int) -> SimpleNamespace:
    """With so many draws left, the one that the step makes among them."""
    return SimpleNamespace(request=SimpleNamespace(max_tokens=20), num_drawn=20 - num_left)


@pytest.mark.parametrize(("num_left", "num_drafted"), [(20, 5), (4, 3), (2, 1), (1, 0)])
def test_no_more_is_drafted_than_an_answer_has_left(num_left: int, num_drafted: int) -> None:
    drafter = ProfileDrafter(DraftConfig(profile="indexed", most_tokens=5), shared_chances())
    token_ids, chances = drafter.look(sequence_of(num_left))
    assert token_ids == [TO_DRAFT] * num_drafted
    assert len(chances) == num_drafted
    assert chances == sorted(chances, reverse=True)


def test_chances_go_by_what_was_drawn_and_others_learn_from_it() -> None:
    shared = shared_chances()
    drafters = [ProfileDrafter(DraftConfig(profile="indexed"), shared) for _ in range(3)]
    first = drafters[0].look(sequence_of(20))[1][0]
    for _ in range(40):
        drafters[0].judge(7, 7)
    assert drafters[0].look(sequence_of(20))[1][0] > max(0.97, first)
    assert first < drafters[1].look(sequence_of(20))[1][0]
    for _ in range(60):
        drafters[1].judge(7, 0)
    assert drafters[1].look(sequence_of(20))[1][0] < 0.1
    assert drafters[2].look(sequence_of(20))[1][0] < first


def test_what_was_not_drafted_for_long_is_tried_again() -> None:
    """Chances are seen of drafts alone: without this, a request that was drafted badly once never would be again."""
    drafter = ProfileDrafter(DraftConfig(profile="indexed"), shared_chances())
    for _ in range(60):
        drafter.judge(7, 0)
    looks = [drafter.look(sequence_of(20))[1][0] for _ in range(TRIED_AGAIN + 1)]
    assert max(looks[:-1]) < 0.1
    assert looks[-1] == 1.0
    drafter.judge(7, 0)
    assert drafter.look(sequence_of(20))[1][0] < 0.1
