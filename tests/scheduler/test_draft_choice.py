"""Where drafts come from and when they pay: n-grams against a search of the whole text, chances and times as seen, and
a clock by which what does not pay is off.
"""

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.engine_patches import switch_drafts
from gpu.config import DraftConfig
from gpu.step import Lane
from scheduler.drafts.acceptance import Acceptance, shared_chances
from scheduler.drafts.draft_source import Proposal
from scheduler.drafts.drafter import make_source
from scheduler.drafts.ngrams import LONGEST_CHAIN, LONGEST_MATCH, NGrams
from scheduler.drafts.step_times import StepTimes
from scheduler.messages import pack_tokens
from scheduler.sequences.sequence import Sequence
from scheduler.steps.drafts import LEAST_GAIN, Drafts
from tests.scheduler import engines
from tests.scheduler.drafting import DRAFTING, Foreseen
from tests.scheduler.engines import check_output, drain, make_engine, make_request, prompt_of
from tests.scheduler.page_runner import expected_output

NO_TOKENS = np.zeros(0, np.int32)


def found(text: list[int], least: int) -> tuple[int, int]:
    """The place behind the longest earlier copy of the text's end, the latest of these, and its length."""
    best, best_length = -1, 0
    for place in range(len(text) - 1, least - 1, -1):
        length = 0
        while length < min(place, LONGEST_MATCH) and text[place - 1 - length] == text[-1 - length]:
            length += 1
        if length >= least and length > best_length:
            best, best_length = place, length
    return best, best_length


@given(st.lists(st.integers(0, 3), max_size=60), st.integers(2, 4), st.integers(1, 9), st.data())
@settings(max_examples=300, deadline=None)
def test_a_proposal_follows_the_longest_earlier_copy(
    text: list[int], least: int, most: int, data: st.DataObject
) -> None:
    """However the text comes, in pieces of any length. Few positions share a chain, so all of it is looked at."""
    source, at = NGrams(least, NO_TOKENS), 0
    while at < len(text):
        end = data.draw(st.integers(at + 1, len(text)))
        source.observe(np.array(text[at:end], np.int32))
        at = end
    assert source.num_observed == len(text)
    proposal = source.propose(most)
    place, length = found(text, least)
    assert len(text) <= LONGEST_CHAIN
    assert proposal.num_matched == length
    goes_on = list(text)
    while length and len(goes_on) < len(text) + most:
        goes_on.append(goes_on[place + len(goes_on) - len(text)])
    assert list(proposal.token_ids) == goes_on[len(text) :]


def test_n_grams_of_a_long_text_are_found_and_arrays_grow() -> None:
    text = np.random.default_rng(0).integers(0, 50_000, 20_000, dtype=np.int32)
    source = NGrams(3, text[:10])
    for begin in range(0, len(text), 700):
        source.observe(text[begin : begin + 700])
    for at in (40, 9_000, 19_000):
        source.observe(text[at : at + 5])
        assert list(source.propose(6).token_ids) == text[at + 5 : at + 11].tolist()
    source.forget()
    assert source.propose(6).token_ids == ()


def test_a_predicted_text_is_proposed_from_its_begin_and_wherever_the_answer_comes_back_to_it() -> None:
    prompt, predicted = list(range(100, 130)), list(range(200, 260))
    request = make_request("1", prompt)
    request = type(request)(**{name: getattr(request, name) for name in request.__struct_fields__}
                            | {"prediction": pack_tokens(predicted)})  # fmt: skip
    sequence = Sequence(request, DRAFTING, np.array(prompt, np.int32), [])
    source = make_source(DraftConfig(), sequence)
    source.observe(sequence.prompt)
    assert list(source.propose(5).token_ids) == predicted[:5]
    source.observe(np.array([7, 8, 9, *predicted[20:24]], np.int32))
    assert list(source.propose(4).token_ids) == predicted[24:28]
    assert source.num_observed == len(prompt) + 7


def test_chances_follow_what_came_and_a_request_goes_by_its_own() -> None:
    draw, shared = Random(1), shared_chances()
    often, seldom = Acceptance(shared), Acceptance(shared)
    before = often.chances(Proposal([1] * 4, 5))
    assert before == sorted(before, reverse=True)
    for _ in range(300):
        often.judge(Proposal([1], 5), [1 if draw.random() < 0.95 else 2])
        seldom.judge(Proposal([1], 5), [1 if draw.random() < 0.05 else 2])
    assert often.chances(Proposal([1], 5))[0] > 0.8
    assert seldom.chances(Proposal([1], 5))[0] < 0.3
    assert 0.25 < Acceptance(shared).chances(Proposal([1], 5))[0] < 0.75


def test_a_proposal_is_judged_up_to_its_first_wrong_token() -> None:
    acceptance = Acceptance(shared_chances())
    for _ in range(50):
        acceptance.judge(Proposal([1, 2, 3], 3), [1, 5, 3])
    first, second, third = (Proposal([1], matched) for matched in (3, 4, 6))
    assert acceptance.chances(first)[0] > 0.8
    assert acceptance.chances(second)[0] < 0.2
    assert acceptance.chances(third) == Acceptance(shared_chances()).chances(third), (
        "nobody saw what it would have been"
    )


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += seconds


def test_a_step_without_drafts_takes_from_end_to_end_and_one_with_them_until_the_next_launch() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for _ in range(4):  # in flight two at a time, 5 ms each
        times.launch("a", 1, False)
    for _ in range(3):
        clock.wait(5e-3)
        times.end()
    assert times.seconds(False, 1) == pytest.approx(5e-3)
    assert times.expect(2, 1) == pytest.approx(1.1 * 5e-3), "a guess, before one has run"
    assert times.expect(4, 1) is None, "the smaller one is tried first"
    clock.wait(5e-3)
    times.end()
    times.launch("a", 4, True)
    clock.wait(6e-3)
    times.end()
    clock.wait(1e-3)  # the host plans, and the device waits
    times.launch("a", 1, False)
    assert times.expect(4, 1) == pytest.approx(7e-3)
    assert times.expect(3, 1) == pytest.approx(7e-3), "of the same size"
    assert times.expect(8, 1) == pytest.approx(7e-3 + 2e-3), "as 4 rows over 1"
    assert times.expect(2, 1) == pytest.approx(1.1 * 5e-3)
    times.end()
    times.launch("a", 2, True)
    clock.wait(6e-3)
    times.end()
    times.launch("a", 1, False)
    assert times.expect(8, 1) == pytest.approx(7e-3 + 2e-3), "as 4 rows over 2"


def test_steps_with_units_and_steps_of_others_tell_nothing_and_what_is_old_is_forgotten() -> None:
    clock = Clock()
    times = StepTimes(clock)
    for rows in ("a", None, "a", "b", "a"):
        times.launch(rows, 1, False)
        clock.wait(5e-3)
        times.end()
    assert times.seconds(False, 1) is None
    for rows, size in (("a", 2), *[("a", 1)] * 600):
        times.launch(rows, size, False)
        clock.wait(5e-3)
        times.end()
    assert times.seconds(False, 2) is None
    assert times.seconds(False, 1) == pytest.approx(5e-3)


@pytest.mark.parametrize(("chance", "wide_s", "wanted"), [
    (0.9, 5.5e-3, 7), (0.9, 30e-3, 1), (0.02, 5.1e-3, 0), (0.5, 5.5e-3, None),
])  # fmt: skip
def test_as_many_tokens_are_drafted_as_pay(chance: float, wide_s: float, wanted: int | None) -> None:
    """By the chances and the times of widths; a step of 2 rows takes 5.2 ms, one of 4 lies between that and 8's."""
    clock = Clock()
    drafts = Drafts(16, None, None, [Lane.DEVICE], clock)  # type: ignore[arg-type]
    times = drafts.times[Lane.DEVICE]
    seconds = {1: 5e-3, 2: 5.2e-3, 4: (5.2e-3 + wide_s) / 2, 8: wide_s, 16: 9 * wide_s}
    for size, has_drafts in ((1, False), (1, False), *((size, True) for size in (2, 4, 8, 16))):
        for _ in range(3):
            times.launch("a", size, has_drafts)
            clock.wait(seconds[size])
            times.end()
    chances = [chance ** (place + 1) for place in range(7)]
    (length,) = drafts.choose_by_gain([([1] * 7, chances)], 1, times)
    rates = {num: (1 + sum(chances[:num])) / seconds[1 + num] for num in (0, 1, 3, 7)}
    rates[0] *= LEAST_GAIN
    best = max(rates, key=lambda num: rates[num])
    assert length == best
    assert wanted is None or length == wanted
    assert drafts.choose_by_gain([([], [])], 1, times) == [0]


def test_the_likeliest_tokens_of_all_rows_fill_a_step() -> None:
    clock = Clock()
    drafts = Drafts(8, None, None, [Lane.DEVICE], clock)  # type: ignore[arg-type]
    for _ in range(3):
        drafts.times[Lane.DEVICE].launch("a", 4, False)
        clock.wait(5e-3)
        drafts.times[Lane.DEVICE].end()
    looks = [([1] * 7, [0.3, 0.1, 0.0, 0.0, 0.0, 0.0, 0.0]), ([1] * 7, [0.99] * 7), ([], []), ([1], [0.5])]
    assert drafts.choose_by_gain(looks, 4, drafts.times[Lane.DEVICE]) == [0, 4, 0, 0]


@pytest.mark.parametrize(("spoilt", "row_s", "pays"), [(0.05, 0.0, True), (0.05, 20e-3, False), (1.0, 0.0, False)])
def test_drafts_are_off_by_themselves_where_they_do_not_pay(
    monkeypatch: pytest.MonkeyPatch, spoilt: float, row_s: float, pays: bool
) -> None:
    """A step takes 5 ms and `row_s` for each row more; with drafts the device waits 0.5 ms for the host."""
    monkeypatch.setitem(engines.PROFILES, "drafting", DRAFTING)
    seconds, tokens = {}, 400
    for is_on in (False, True):
        engine, runner = make_engine(max_running=16, is_pipelined=False)
        clock = Clock()
        engine.scheduler.drafts = drafts = Drafts(
            16, engine.scheduler.residence, engine.scheduler.rings, [Lane.DEVICE], clock
        )
        switch_drafts(drafts, is_on)
        request = make_request("1", prompt_of(20, 3), tokens, profile="drafting")
        output = expected_output(request.prompt_token_ids, tokens, [], "drafting", 0)
        drafts.make_source = lambda config, sequence, output=output: Foreseen(20, output, spoilt, Random(4))
        launch = runner.launch

        def timed(plan, clock=clock, launch=launch):  # type: ignore[no-untyped-def]
            rows = sum(sum(group.lengths) for group in plan.decode)
            clock.wait((5e-3 + row_s * (rows - 1) + 5e-4 * (rows > 1)) if rows else 0.0)
            return launch(plan)

        runner.launch = timed  # type: ignore[method-assign]
        engine.submit([request])
        check_output(request, drain(engine)["1"])
        seconds[is_on] = clock.now - 100.0
    if pays:
        assert seconds[True] < 0.5 * seconds[False]
        saved = drafts.stats().saved_seconds
        assert saved == pytest.approx(seconds[False] - seconds[True], rel=0.15)
    else:
        assert seconds[False] < seconds[True] < seconds[False] / 0.98 + 3 * row_s + 5e-3
