"""Steps that drafts of a width take are counted as a step draws: the token behind each accepted one comes with it."""

from lab.speed.accepted_drafts import count_steps, steps_of


def test_steps_are_counted_by_what_the_prompt_repeats() -> None:
    prompt, copied = list(range(40)), list(range(10, 26))
    assert count_steps(list(range(100, 140)), copied, 8, 3) == len(copied) - 1, "nothing stands there"
    text = [7, 8, 9, *range(10, 30)]  # three tokens until the copy is seen, one draft of 7 and its own draw a step
    assert count_steps(prompt, text, 8, 3) == 2 + -(-20 // 8)
    assert count_steps(prompt, text, 2, 3) == 2 + -(-20 // 2)


def test_steps_are_counted_by_where_another_token_is_drawn() -> None:
    assert steps_of([False] * 5, 8) == 5
    assert steps_of([True] * 16, 8) == 2
    assert steps_of([True, True, False, True, False, True], 8) == 3
    assert steps_of([True, False, True, True], 2) == 2
