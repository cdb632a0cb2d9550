"""Requests that are held to something draw from what they may, whatever runs beside them, is preempted or fails."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from gpu.sampling_params import SamplingParams
from gpu.step import StepPlan
from scheduler.constraints import constraints
from scheduler.constraints.constraints import Constraints, GrammarError
from scheduler.engine.engine import Engine
from scheduler.messages import Delta, EngineRequest, pack_tokens
from tests.scheduler import host_engines
from tests.scheduler.engines import SHAPE, drain, make_engine, make_request, prompt_of, text
from tests.scheduler.page_runner import VOCAB, PageRunner, draw_token

END = VOCAB - 1
LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"  # token i is letter i, and the last one ends a text
PAIRS = LLMatcher.grammar_from_regex("(ab|ba){2,8}c?")
STOPS = [END]


class _Letters:
    eos_token_id = END
    bos_token_id = None
    tokens = (*(letter.encode() for letter in LETTERS), *(f"<{i}>".encode() for i in range(END, SHAPE.vocab_size)))
    special_token_ids = tuple(range(END, SHAPE.vocab_size))

    def __call__(self, raw: bytes) -> list[int]:
        return [LETTERS.index(chr(byte)) for byte in raw]


def letters() -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Letters()))


def pairs_may_go_on(output: list[int]) -> set[int] | None:
    """The tokens that `PAIRS` allows next, by hand; None: it is complete, and nothing can follow."""
    a, b, c = 0, 1, 2
    if output and output[-1] == c:
        return None
    if len(output) % 2:
        return {a + b - output[-1]}
    whole = {c, END} if len(output) >= 4 else set()
    return whole | ({a, b} if len(output) < 16 else set())


WORDS = ("abcdefghijklmnopqrstuvw", "bABCDEFG", "bAxy")
TEXT = LLMatcher.grammar_from_regex(f"({'|'.join(WORDS)}){{1,4}}z")


def words_may_go_on(output: list[int]) -> set[int] | None:
    """The tokens that `TEXT` allows next, by hand; None: it is complete."""
    written, num_words = "".join(LETTERS[token] for token in output if token < len(LETTERS)), 0
    while whole := [word for word in WORDS if written.startswith(word)]:
        written, num_words = written[len(whole[0]) :], num_words + 1
    if written == "z":
        return None
    begun = {word[len(written)] for word in WORDS if word.startswith(written)} if num_words < 4 else set()
    return {LETTERS.index(letter) for letter in begun | ({"z"} if num_words and not written else set())}


@dataclass(frozen=True)
class Held:
    """A way of being held, and the tokens that it allows behind an output."""

    fields: dict[str, object]
    allow: Callable[[list[int]], set[int] | None]


EVERYTHING = set(range(VOCAB))
RUNS = [[7], [3, 4], [11, 12, 13], [4, 3]]


def allow_runs(output: list[int]) -> set[int]:
    banned = {
        run[-1] for run in RUNS if output[len(output) - len(run) + 1 :] == run[:-1] and len(output) >= len(run) - 1
    }
    return EVERYTHING - banned


KINDS = {
    "free": Held({}, lambda output: EVERYTHING),
    "grammar": Held({"grammar": PAIRS}, pairs_may_go_on),
    "runs": Held({"bad_token_ids": RUNS}, allow_runs),
    "allowed": Held({"allowed_token_ids": [3, 4, 30, END]}, lambda output: {3, 4, 30, END}),
    "late": Held({"min_tokens": 6}, lambda output: EVERYTHING - ({END} if len(output) < 6 else set())),
    "text": Held({"grammar": TEXT}, words_may_go_on),
    "text beside": Held(
        {"grammar": TEXT, "bad_token_ids": [[LETTERS.index("A"), LETTERS.index("x")]], "min_tokens": 30},
        lambda output: (
            None
            if (allowed := words_may_go_on(output)) is None
            else allowed - ({LETTERS.index("x")} if output[-1:] == [LETTERS.index("A")] else set())
        ),
    ),
    "all": Held(
        {"grammar": PAIRS, "bad_token_ids": [[0, 1, 1]], "min_tokens": 6},
        lambda output: (
            None
            if (allowed := pairs_may_go_on(output)) is None
            else allowed - ({1} if output[-2:] == [0, 1] else set()) - ({END} if len(output) < 6 else set())
        ),
    ),
}  # fmt: skip


def held(name: str, kind: str, prompt: list[int], max_tokens: int = 20, profile: str = "exact") -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=pack_tokens(prompt),
        sampling=SamplingParams(temperature=0.0),
        max_tokens=max_tokens,
        stop_token_ids=STOPS,
        attention_profile=profile,
        arrival_s=time.monotonic(),
        **KINDS[kind].fields,
    )


def expected(request: EngineRequest, kind: str) -> tuple[list[int], str]:
    """The output of a request that runs alone, and why it ends."""
    prompt, output = request.prompt_token_ids, list[int]()
    while len(output) < request.max_tokens:
        allowed = KINDS[kind].allow(output)
        if allowed is None:
            return output, "stop"
        output.append(draw_token(prompt + output, request.attention_profile, sorted(EVERYTHING - allowed)))
        if output[-1] == END:
            return output, "stop"
    is_complete = KINDS[kind].allow(output) is None
    return output, "stop" if is_complete and len(output) < request.max_tokens else "length"


def check(request: EngineRequest, kind: str, deltas: list[Delta]) -> None:
    output, reason = expected(request, kind)
    assert text(deltas) == output, kind
    assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + [reason]
    if reason == "stop" and output[-1] != END:  # its last token is text
        assert deltas[-1].token_ids == []


def with_letters(engine: Engine) -> Engine:
    """As if the model's vocabulary were these."""
    engine.scheduler.constraints._read_tokens = letters
    return engine


workloads = st.lists(
    st.tuples(st.sampled_from(sorted(KINDS)), st.integers(1, 90), st.integers(1, 40), st.integers(0, 12)),
    min_size=1,
    max_size=8,
)


@settings(deadline=None, max_examples=15)
@given(
    workload=workloads,
    num_pages=st.sampled_from([10, 14, 60]),
    is_pipelined=st.booleans(),
    max_running=st.integers(1, 6),
)
def test_each_draws_from_what_it_may_whatever_runs_beside_it_or_is_preempted(
    workload: list[tuple[str, int, int, int]], num_pages: int, is_pipelined: bool, max_running: int
) -> None:
    made, _ = make_engine(num_pages=num_pages, is_pipelined=is_pipelined, max_running=max_running)
    engine = with_letters(made)
    requests = [held(f"{i}", kind, prompt_of(n, i), most) for i, (kind, n, most, _) in enumerate(workload)]
    deltas: dict[str, list[Delta]] = {}
    for step in range(4000):
        for request, (_, _, _, arrives) in zip(requests, workload, strict=True):
            if step == arrives:
                engine.submit([request])
        for delta in engine.step() if engine.has_work else []:
            deltas.setdefault(delta.request_id, []).append(delta)
        if step > 12 and not engine.has_work:
            break
    for request, (kind, _, _, _) in zip(requests, workload, strict=True):
        check(request, kind, deltas[request.request_id])


@pytest.mark.parametrize("seed", range(3))
def test_in_two_lanes_each_draws_from_what_it_may(seed: int) -> None:
    made, _ = host_engines.make_engine(order=Random(seed), num_pages=80)
    engine = with_letters(made)
    kinds = [*KINDS, *KINDS]
    profiles = ["offloaded", "exact"] * len(KINDS)
    requests = [
        held(f"{i}", kind, prompt_of(600 if i % 4 < 2 else 40, i), 40, profiles[i]) for i, kind in enumerate(kinds)
    ]
    engine.submit(requests[:6])
    deltas: dict[str, list[Delta]] = {}
    for step in range(40):
        if step == 20:
            engine.submit(requests[6:])
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    for name, more in drain(engine).items():
        deltas.setdefault(name, []).extend(more)
    for request, kind in zip(requests, kinds, strict=True):
        check(request, kind, deltas[request.request_id])


class Noting(PageRunner):
    """Notes in which order steps are launched, drawn and told of."""

    def __init__(self) -> None:
        super().__init__(SHAPE.num_layers, 16)
        self.notes: list[tuple[str, int]] = []
        self.numbers: dict[int, int] = {}

    def launch(self, plan: StepPlan):
        done = super().launch(plan)
        number = self.numbers[id(done)] = len(self.numbers)
        self.notes.append(("launch", number))
        collect, notes = done.collect, self.notes
        kept.append(done)

        def collected():
            notes.append(("collect", number))
            return collect()

        done.collect = collected
        return done

    def draw(self, step, masks) -> None:
        self.notes.append(("draw", self.numbers[id(step)]))
        super().draw(step, masks)


kept: list[object] = []  # so that no two have one id


def test_a_step_is_launched_before_what_its_rows_are_held_to_is_known() -> None:
    runner = Noting()
    engine = with_letters(make_engine(runner=runner)[0])
    engine.submit([_with_grammar(held("a", "grammar", prompt_of(20)), LLMatcher.grammar_from_regex("[abc]{20}"))])
    drain(engine)
    for number in range(2, 6):
        told = [runner.notes.index((what, one)) for what, one in
                (("launch", number), ("collect", number - 1), ("draw", number), ("launch", number + 1))]  # fmt: skip
        assert told == sorted(told)


def test_what_depends_on_no_draw_is_drawn_at_once() -> None:
    check_drawn_at_once([held("a", "allowed", prompt_of(20)), held("b", "free", prompt_of(30))], range(1, 5))


def test_what_depends_on_a_draw_that_is_certain_is_drawn_at_once() -> None:
    """Of pairs, the second letter is: the step behind it takes the first of the next pair without a wait."""
    check_drawn_at_once([held("a", "grammar", prompt_of(20))], range(3, 6, 2))


def check_drawn_at_once(requests: list[EngineRequest], numbers: range) -> None:
    runner = Noting()
    engine = with_letters(make_engine(runner=runner)[0])
    engine.submit(requests)
    drain(engine)
    for number in numbers:
        place = runner.notes.index(("launch", number))
        assert runner.notes[place + 1] == ("draw", number)


def test_steps_without_masks_are_launched_whole() -> None:
    runner = Noting()
    engine, _ = make_engine(runner=runner)
    engine.submit([make_request("a", prompt_of(20)), make_request("b", prompt_of(50), stop=[3])])
    drain(engine)
    assert not any(what == "draw" for what, _ in runner.notes)
    assert not any(plan.masked_slots for plan in runner.plans)
    assert engine.stats().masks.masks == 0


def test_a_grammar_that_fails_ends_its_request_alone_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_letters(make_engine()[0])
    fails = held("fails", "grammar", prompt_of(20, 1), 30)
    beside = [held("free", "free", prompt_of(30)), held("held", "grammar", prompt_of(40))]
    engine.submit([fails, *beside])
    matcher = engine.scheduler.roster._unfinished["fails"].constraint.matcher
    deltas = {delta.request_id: [delta] for delta in engine.step()}
    while len(deltas.get("fails", [])) < 2:
        for delta in engine.step():
            deltas.setdefault(delta.request_id, []).append(delta)
    matcher.consume_token(END)  # what cannot follow here
    for name, more in drain(engine).items():
        deltas.setdefault(name, []).extend(more)
    assert deltas["fails"][-1].finish_reason == "error"
    assert deltas["fails"][-1].error.startswith("grammar: the answer cannot go on (")
    for request, kind in zip(beside, ("free", "grammar"), strict=True):
        check(request, kind, deltas[request.request_id])


def test_a_grammar_that_cannot_be_compiled_refuses_what_was_submitted() -> None:
    engine = with_letters(make_engine()[0])
    request = held("a", "grammar", prompt_of(20))
    with pytest.raises(GrammarError, match="unknown special token"):
        engine.submit([make_request("b", prompt_of(9)), _with_grammar(request, "start: <|call|>")])
    assert not engine.has_work
    engine, _ = make_engine()
    with pytest.raises(GrammarError, match=r"no tokenizer; set model\.tokenizer"):
        engine.submit([request])


def _with_grammar(request: EngineRequest, text: str) -> EngineRequest:
    return EngineRequest(**{name: getattr(request, name) for name in request.__struct_fields__} | {"grammar": text})


def test_requests_of_one_grammar_have_it_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    original = constraints.LLMatcher

    def counting(*arguments: object, **more: object) -> LLMatcher:
        made.append(arguments)
        return original(*arguments, **more)

    monkeypatch.setattr(constraints, "LLMatcher", counting)
    engine = with_letters(make_engine(max_running=8)[0])
    requests = [held(f"{i}", "grammar", prompt_of(20, i)) for i in range(5)]
    engine.submit(requests[:3])
    engine.submit(requests[3:])
    deltas = drain(engine)
    for request in requests:
        check(request, "grammar", deltas[request.request_id])
    assert len(made) == 1
    for i in range(constraints._MOST_COMPILED + 3):
        engine.submit([_with_grammar(held(f"n{i}", "grammar", [1]), LLMatcher.grammar_from_regex(f"a{{{i + 1}}}"))])
        engine.cancel([f"n{i}"])
    assert len(engine.scheduler.constraints._compiled) == constraints._MOST_COMPILED


def test_masks_are_counted() -> None:
    engine = with_letters(make_engine()[0])
    request = held("a", "grammar", prompt_of(20))
    engine.submit([request, held("b", "free", prompt_of(20, 1))])
    drain(engine)
    stats = engine.stats().masks
    assert stats.held_requests == 1
    assert len(expected(request, "grammar")[0]) <= stats.masks <= len(expected(request, "grammar")[0]) + 1
    assert stats.mask_seconds > 0


def test_text_that_must_come_has_its_own_tokens_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no search of the vocabulary; but a token that another rule bans is searched for, and not found."""
    searched = []
    fill = constraints.fill_next_token_bitmask

    def count(*arguments: object) -> None:
        searched.append(arguments)
        fill(*arguments)

    monkeypatch.setattr(constraints, "fill_next_token_bitmask", count)
    held = Constraints(SHAPE.vocab_size, letters)
    grammar = LLMatcher.grammar_from_regex("[ab]cdef[ab]")
    free = msgspec.structs.replace(make_request("free", prompt_of(4, 0), 8), grammar=grammar)
    barred = msgspec.structs.replace(free, bad_token_ids=((3,),))
    for request, num_searches, allowed in (
        (free, 2, [{0, 1}, {2}, {3}, {4}, {5}, {0, 1}]),
        (barred, 2, [{0, 1}, {2}, set()]),
    ):
        searched.clear()
        (one,) = held.prepare([request], lambda: None)
        output: list[int] = []
        for wanted in allowed:
            (words,) = held.fill([(one, len(output), output, ())])
            assert bits_of(words) == wanted
            if wanted:
                output.append(max(wanted))
                held.consume([(one, output[-1])])
        assert len(searched) == num_searches
    held.shutdown()


def bits_of(words: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_a_run_of_bad_tokens_is_banned_behind_all_of_it_alone() -> None:
    held = Constraints(SHAPE.vocab_size, letters)
    request = msgspec.structs.replace(make_request("r", prompt_of(4, 0), 8), bad_token_ids=((1, 2, 3),))
    (one,) = held.prepare([request], lambda: None)
    for output, is_banned in (([1, 2], True), ([5, 2], False), ([2], False), ([1], False), ([1, 2, 5, 1, 2], True)):
        (words,) = held.fill([(one, len(output), output, ())])
        assert (3 not in bits_of(words)) == is_banned
    held.shutdown()
