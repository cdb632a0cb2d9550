"""What conversations leave: which goes first, what an agent's helpers do not evict, and what is told of it."""

import math
import time
from types import SimpleNamespace

import pytest
from msgspec import structs

from scheduler.cache import conversations
from scheduler.cache.idle_pages import LeastRecent
from scheduler.engine.engine import Engine
from scheduler.messages import AskSessions, EngineRequest, KeptConversation
from scheduler.residence.kept_sessions import answer_sessions
from tests.scheduler.engines import PAGE, check_empty, check_output, drain, make_engine, make_request, prompt_of, text
from tests.scheduler.host_engines import check_idle
from tests.scheduler.host_engines import make_engine as make_host_engine


class Talk:
    """A conversation that grows by an answer and `num_new` tokens a turn."""

    def __init__(self, engine: Engine, name: str, start: list[int], **fields: object) -> None:
        self.engine, self.name, self.tokens, self.fields = engine, name, start, fields
        self.num_turns = 0

    def turn(self, num_new: int = 20, calls: bool = True) -> int:
        """Ask the next turn, and return how many tokens of its prompt were computed."""
        self.num_turns += 1
        self.tokens = self.tokens + prompt_of(num_new, hash(self.name) % 1000 + self.num_turns)
        plain = make_request(f"{self.name}-{self.num_turns}", self.tokens, 6)
        request: EngineRequest = structs.replace(plain, **self.fields)
        self.engine.submit([request])
        deltas = drain(self.engine)[request.request_id]
        check_output(request, deltas)
        if calls:
            self.engine.scheduler.residence.conversations.expect([request.request_id])
        computed = len(self.tokens) - deltas[0].num_cached_tokens
        self.tokens = self.tokens + text(deltas)
        return computed


def burst(engine: Engine, session: str, num_agents: int, num_turns: int = 4) -> None:
    """Agents that are started one after another, work for some turns, and end."""
    for agent in range(num_agents):
        talk = Talk(engine, f"agent{agent}", prompt_of(150, 50 + agent), session=session)
        for turn in range(num_turns):
            talk.turn(calls=turn < num_turns - 1)


def parent_after_burst(num_agents: int, session: str, plain: bool = False) -> tuple[int, int]:
    """Return what a parent's turn computes behind a burst of its agents, and the tokens it has."""
    engine, _ = make_engine(num_pages=60)  # room for 960 tokens: the parent, and an agent and a half
    if plain:
        engine.scheduler.pages.idle.ranks = LeastRecent()
    parent = Talk(engine, "parent", prompt_of(500, 3), session=session)
    parent.turn()
    parent.turn()
    burst(engine, session, num_agents)
    return parent.turn(), len(parent.tokens)


def test_a_burst_of_agents_does_not_evict_the_conversation_that_started_them() -> None:
    computed, _ = parent_after_burst(12, "s")
    assert computed <= 20 + 6 + PAGE, "no more than what is new, and a block"
    computed, whole = parent_after_burst(12, "s", plain=True)
    assert computed > whole // 2, "what was used longest ago goes first: this is what is better now"


def test_without_a_session_it_outlives_some_agents_and_not_any_number() -> None:
    assert parent_after_burst(5, "")[0] <= 20 + 6 + PAGE
    computed, whole = parent_after_burst(80, "")
    assert computed > whole // 2, "what nobody comes back to goes in the end"


def stranger(number: int) -> list[int]:
    """A prompt that begins as no other does."""
    return [7, number // 50, number % 50, *prompt_of(300, number)]


WINDOWS = {"num_windows": 6}
STATES = {"num_states": 6}
HOST_STATES = {"num_states": 2, "num_host_states": 5}


@pytest.mark.parametrize("kept", [WINDOWS, STATES, HOST_STATES])
@pytest.mark.parametrize("session", ["s", ""])
def test_a_burst_of_agents_leaves_their_parent_its_window_or_state(kept: dict[str, int], session: str) -> None:
    engine, _ = make_engine(num_pages=600, **kept)
    parent = Talk(engine, "parent", prompt_of(303, 1), session=session)
    parent.turn()
    for number in range(60):
        Talk(engine, f"agent{number}", stranger(number), session=session).turn(calls=False)
    computed, num_tokens = parent.turn(), len(parent.tokens)
    assert computed < 60 if session else computed > num_tokens - 60, "all of it, where nobody knows of the session"


@pytest.mark.parametrize("kept", [WINDOWS, STATES])
def test_the_end_of_a_pinned_front_stays(kept: dict[str, int], monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make_engine(num_pages=600, **kept)
    held = engine.scheduler.residence.conversations
    held._alive_seconds, now = 600.0, time.monotonic()
    monkeypatch.setattr("scheduler.cache.conversations.time.monotonic", lambda: now)

    def computed(name: str, salt: int) -> int:
        prompt = prompt_of(320, 9) + prompt_of(60, salt)
        return Talk(engine, name, prompt, session=name, front_tokens=320).turn(calls=False)

    assert [computed(f"first{number}", 20 + number) for number in range(3)][2] < 100
    for number in range(30):
        Talk(engine, f"other{number}", stranger(number)).turn(calls=False)
    assert computed("last", 30) < 100
    now += 601.0
    for number in range(30):
        Talk(engine, f"more{number}", stranger(100 + number)).turn(calls=False)
    assert computed("too late", 31) > 300


@pytest.mark.parametrize("kept", [WINDOWS, STATES, HOST_STATES])
def test_forgetting_takes_the_windows_and_states_of_a_conversation_alone(kept: dict[str, int]) -> None:
    engine, _ = make_engine(num_pages=600, **kept)
    windows = engine.scheduler.residence.windows
    shared = prompt_of(160, 9)
    talks = [Talk(engine, name, shared + prompt_of(60, salt), session=name) for salt, name in enumerate("abc")]
    for talk in talks:
        talk.turn(calls=False)
    ask(engine, forget="a")
    ask(engine, forget="b")
    assert talks[2].turn(calls=False) < 60, "the other one goes on"
    ask(engine, forget="c")
    assert (windows.num_kept, len(windows._host)) == (0, 0)
    check_empty(engine)


def test_what_ended_goes_before_what_waits_for_its_tools() -> None:
    for calls in (True, False):
        engine, _ = make_engine(num_pages=40)
        first = Talk(engine, "first", prompt_of(200, 1))
        first.turn(calls=calls)
        second = Talk(engine, "second", prompt_of(200, 2))
        second.turn(calls=not calls)
        Talk(engine, "third", prompt_of(300, 4)).turn(calls=False)
        awaited = first if calls else second
        assert awaited.turn() <= 20 + 6 + PAGE, awaited.name


def test_a_long_conversation_is_worth_more_than_a_short_one() -> None:
    engine, _ = make_engine(num_pages=40)
    long, short = Talk(engine, "long", prompt_of(360, 1)), Talk(engine, "short", prompt_of(100, 2))
    long.turn(calls=False)
    short.turn(calls=False)
    Talk(engine, "third", prompt_of(100, 4)).turn(calls=False)
    assert long.turn(calls=False) <= 20 + 6 + PAGE


def test_the_systems_words_stay_while_their_session_is_alive(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    engine, _ = make_engine(num_pages=40)
    engine.scheduler.residence.conversations._alive_seconds = 600.0
    monkeypatch.setattr(conversations, "time", SimpleNamespace(monotonic=lambda: now[0]))
    system = prompt_of(160, 9)

    def first_turn(name: str) -> int:
        return Talk(engine, name, system, session=name, front_tokens=160).turn(40, calls=False)

    first_turn("one")
    for number in range(10):  # others, whose prompts take all pages
        Talk(engine, f"other{number}", prompt_of(400, 20 + number)).turn(calls=False)
    assert first_turn("two") == 40, "all of the front was there, and nothing else"
    now[0] += 1000.0
    for number in range(10):
        Talk(engine, f"more{number}", prompt_of(400, 40 + number)).turn(calls=False)
    assert first_turn("three") == 200, "nothing is kept for sessions that nobody uses"


def test_fronts_of_prompts_that_nobody_follows_are_pinned_neither_for_long_nor_beyond_half_of_the_pages() -> None:
    engine, _ = make_engine(num_pages=80)
    held = engine.scheduler.residence.conversations
    held._alive_seconds = 600.0
    for number in range(6):  # questions about texts of their own, which stand where the system's words do
        Talk(engine, f"one{number}", prompt_of(160, number), front_tokens=160).turn(calls=False)
    assert not held._pinned
    for number in range(6):
        Talk(engine, f"s{number}", prompt_of(160, 20 + number), front_tokens=160, session=f"s{number}").turn()
    assert held._num_pinned == 40 == sum(front.num_blocks for front in held._pinned.values())
    talk = Talk(engine, "talk", prompt_of(160, 40), front_tokens=160)
    talk.turn()
    talk.turn()
    assert talk.num_turns == 2
    assert len(held._pinned) == 4, "of several turns without a name; the one used longest ago is no longer pinned"


def test_a_rank_that_falls_is_told_of() -> None:
    engine, _ = make_engine()
    held = engine.scheduler.residence.conversations
    talk = Talk(engine, "talk", prompt_of(100, 1))
    talk.turn()
    (one,) = held
    held.take_lowered()
    awaited = held.rank_of(one.number)
    talk.turn(calls=False)
    assert held.rank_of(one.number) < awaited
    assert one.number in held.take_lowered()
    held.forget(one)
    assert held.take_lowered() == [one.number]
    assert held.rank_of(one.number) == -math.inf


def test_a_front_that_nothing_else_is_left_of_goes_for_a_prompt_that_needs_all_pages() -> None:
    engine, _ = make_engine(num_pages=40)
    engine.scheduler.residence.conversations._alive_seconds = 600.0
    engine.scheduler.residence.conversations._most_pinned = 40
    Talk(engine, "one", prompt_of(320, 9), session="s", front_tokens=320).turn()
    assert Talk(engine, "all", prompt_of(600, 1)).turn() == 620


def test_a_prompt_goes_on_with_the_conversation_that_it_begins_with_and_an_edited_one_is_new() -> None:
    engine, _ = make_engine()
    talk = Talk(engine, "talk", prompt_of(100, 1), session="s")
    talk.turn()
    talk.turn()
    (one,) = engine.scheduler.residence.conversations
    assert (one.num_turns, one.session, one.num_running) == (2, "s", 0)
    edited = Talk(engine, "edited", prompt_of(60, 1) + prompt_of(60, 8), session="s")
    edited.turn()
    assert len(list(engine.scheduler.residence.conversations)) == 2
    forked = Talk(engine, "forked", talk.tokens)
    forked.turn()
    assert len(list(engine.scheduler.residence.conversations)) == 2, "a fork of its end goes on with it"


def ask(engine: Engine, owner: str = "", forget: str = "") -> tuple[list[KeptConversation], int]:
    told = answer_sessions(engine.scheduler.residence, AskSessions("q", owner, forget))
    return told.conversations, told.forgotten_tokens


def test_a_prompt_that_goes_on_from_anothers_is_a_conversation_of_its_own() -> None:
    """Keys that share prefixes share no sessions."""
    engine, _ = make_engine(num_pages=600)
    mine = Talk(engine, "mine", prompt_of(100, 1), owner="me", session="s")
    mine.turn()
    yours = Talk(engine, "yours", mine.tokens, owner="you", session="t")
    assert yours.turn() < 60, "its prefix is found"
    known = engine.scheduler.residence.conversations
    assert {(one.owner, one.session) for one in known._known.values()} == {("me", "s"), ("you", "t")}
    assert mine.turn() < 60


def test_what_is_kept_is_told_and_forgotten_by_its_owner_alone() -> None:
    engine, _ = make_engine()
    Talk(engine, "mine", prompt_of(100, 1), owner="me", session="s").turn()
    Talk(engine, "unnamed", prompt_of(100, 2), owner="me").turn(calls=False)
    Talk(engine, "yours", prompt_of(100, 3), owner="you", session="s").turn()
    unnamed, mine = ask(engine, "me")[0]
    assert (mine.session, mine.turns, mine.running, mine.is_awaited) == ("s", 1, 0, True)
    assert (mine.tokens, mine.device_tokens, mine.host_tokens) == (126, 112, 0)
    assert mine.idle_seconds >= 0
    assert unnamed.session.startswith("conversation-")
    kept, num_forgotten = ask(engine, "me", "s")
    assert ([one.session for one in kept], num_forgotten) == ([unnamed.session], 112)
    assert len(ask(engine, "you")[0]) == 1
    assert ask(engine, "me", unnamed.session) == ([], 112)
    assert engine.scheduler.pages.num_idle == 7, "the other one's pages"


def test_forgetting_leaves_what_others_share_and_what_runs() -> None:
    engine, _ = make_engine()
    shared = prompt_of(64, 9)
    first, second = (Talk(engine, name, shared, session=name) for name in ("first", "second"))
    first.turn(60)
    second.turn(60)
    assert ask(engine, forget="first")[1] == 128 + 6 - 64 - 6, "but the front, which the second begins with"
    assert second.turn() <= 20 + 6 + PAGE
    engine.submit([structs.replace(make_request("r", second.tokens + prompt_of(20, 1), 50), session="second")])
    for _ in range(4):
        engine.step()
    kept, num_forgotten = ask(engine, forget="second")
    assert (num_forgotten, kept[0].running) == (0, 1)
    drain(engine)


def test_forgetting_takes_the_end_of_a_turn_that_was_taken_back() -> None:
    """It fills a block with its answer, and the next turn begins in front of that block."""
    engine, _ = make_engine()
    for seed in (3, 5):
        Talk(engine, f"{seed}", prompt_of(66, 1) + prompt_of(6, seed), session="s").turn(4)
    (one,) = engine.scheduler.residence.conversations
    assert one.num_turns == 2
    assert engine.scheduler.pages.num_idle == len(one.hashes) + 1
    ask(engine, forget="s")
    assert engine.scheduler.pages.num_idle == 0


@pytest.mark.parametrize("is_awaited", [True, False])
def test_contexts_in_host_memory_are_told_ranked_and_forgotten(is_awaited: bool) -> None:
    engine, runner = make_host_engine()
    talk = Talk(engine, "talk", prompt_of(600, 1), session="s", attention_profile="offloaded")
    talk.turn(calls=is_awaited)
    (one,) = ask(engine)[0]
    assert one.host_tokens > 300
    (context,) = engine.scheduler.residence.contexts
    assert engine.scheduler.residence.conversations.rank_of(context.owner) > 0
    assert ask(engine, forget="s")[1] >= one.host_tokens
    drain(engine)
    assert len(engine.scheduler.residence.contexts) == 0
    check_idle(engine, runner)


def test_some_thousand_conversations_are_known_and_no_more() -> None:
    engine, _ = make_engine(num_pages=16)
    for number in range(2060):
        engine.submit([make_request(f"r{number}", [number % 50, number // 50, *prompt_of(14)], 1)])
        if number % 8 == 7:
            drain(engine)
    held = engine.scheduler.residence.conversations
    assert len(list(held)) == 1024
    assert len(held._numbered) == len(held._ending) == len(held._by_request) == 1024
    assert not held._awaited
