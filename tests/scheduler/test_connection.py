"""The engine process's sockets: a thread makes requests ready, cancels pass them, and its end is noticed."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from gpu.profiles import Profile
from gpu.sampling_params import SamplingParams
from scheduler.engine.connection import _SHORT_TOKENS, Arrival, Connection, Prepared
from scheduler.messages import Accepted, Cancel, EngineRequest, FromEngine, Refused, Shutdown, Submit, pack_tokens
from scheduler.sequences.capacity import TooLargeError
from scheduler.sequences.sequence import Sequence


def request_of(name: str, prompt: bytes) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=prompt,
        sampling=SamplingParams(),
        max_tokens=4,
        stop_token_ids=(),
        attention_profile="exact",
        arrival_s=0.0,
    )


class Ends:
    """Both ends: the API process's sockets, and a connection."""

    def __init__(self, folder: Path) -> None:
        addresses = [f"ipc://{folder}/{name}" for name in ("requests", "replies")]
        self._context = zmq.Context()
        self._requests, self._replies = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._requests.bind(addresses[0])
        self._replies.bind(addresses[1])
        self.connection = Connection(*addresses)

    def say(self, message: object) -> None:
        self._requests.send(message if isinstance(message, bytes) else msgspec.msgpack.encode(message))

    def hear(self) -> FromEngine:
        assert self._replies.poll(5000)
        return msgspec.msgpack.decode(self._replies.recv(), type=FromEngine)

    def arrivals(self, count: int) -> list[Arrival]:
        found: list[Arrival] = []
        deadline = time.monotonic() + 10
        while len(found) < count and time.monotonic() < deadline:
            found += self.connection.receive(0.1)
        return found

    def close(self) -> None:
        self.connection.close()
        self._context.destroy(linger=0)


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[Ends]:
    both = Ends(tmp_path)
    yield both
    both.close()


def prepare(requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
    rest()
    if any(request.request_id == "huge" for request in requests):
        raise TooLargeError("asked 9, have 8")
    return [Sequence(request, Profile("exact", "", ()), request.prompt, []) for request in requests]


LONG = [7] * (_SHORT_TOKENS + 1)


def submit_of(submit_id: str, *names: str, tokens: list[int]) -> Submit:
    prompt = pack_tokens(tokens)
    return Submit.of(submit_id, [request_of(name, prompt) for name in names])


def names_of(arrival: Arrival) -> list[str]:
    assert isinstance(arrival, Prepared)
    return [sequence.request_id for sequence in arrival.sequences]


class Held:
    """`prepare`, but those of long prompts stay half way, resting, until they are let go."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.asked: list[str] = []
        self.threads: set[int] = set()

    def prepare(self, requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        self.asked += [request.request_id for request in requests]
        self.threads.add(threading.get_ident())
        deadline = time.monotonic() + 10
        while any(request.num_prompt_tokens == len(LONG) for request in requests) and not self.goes_on.is_set():
            assert time.monotonic() < deadline
            rest()
        return prepare(requests, rest)

    def wait_for(self, name: str) -> None:
        deadline = time.monotonic() + 10
        while name not in self.asked:
            assert time.monotonic() < deadline
            time.sleep(0.001)


@pytest.mark.parametrize("tokens", [[1, 2, 3], LONG], ids=["short", "long"])
def test_submissions_of_a_lane_come_in_order_with_their_requests_made_ready(ends: Ends, tokens: list[int]) -> None:
    ends.connection.listen(prepare)
    ends.say(submit_of("1", "a", "b", tokens=tokens))
    ends.say(submit_of("2", "huge", tokens=tokens))
    ends.say(submit_of("3", "c", tokens=tokens))
    ready, refused, last = ends.arrivals(3)
    assert isinstance(ready, Prepared)
    assert ready.submit_id == "1"
    assert names_of(ready) == ["a", "b"]
    assert ready.sequences[0].prompt is ready.sequences[1].prompt
    assert refused == Refused("2", "too_large", "asked 9, have 8")
    assert names_of(last) == ["c"]
    ends.connection.send(Accepted("1"))
    assert ends.hear() == Accepted("1")


def test_cancel_and_shutdown_come_while_prompts_are_being_hashed(ends: Ends) -> None:
    held = Held()
    ends.connection.listen(held.prepare)
    for name in "ab":
        ends.say(submit_of(name, name, tokens=LONG))
    held.wait_for("a")
    ends.say(Cancel(["before"]))
    ends.say(Shutdown())
    assert ends.arrivals(2) == [Cancel(["before"]), Shutdown()]
    assert ends.connection.receive(0.0) == []
    assert held.threads.isdisjoint({threading.get_ident()})
    held.goes_on.set()
    assert [names_of(arrival) for arrival in ends.arrivals(2)] == [["a"], ["b"]]


def test_a_short_submission_does_not_wait_for_long_ones(ends: Ends) -> None:
    held = Held()
    ends.connection.listen(held.prepare)
    for name in "ab":
        ends.say(submit_of(name, name, tokens=LONG))
    held.wait_for("a")
    ends.say(submit_of("c", "c", "d", tokens=[7] * _SHORT_TOKENS))
    assert [names_of(arrival) for arrival in ends.arrivals(1)] == [["c", "d"]]
    assert held.asked == ["a", "c", "d"]
    held.goes_on.set()
    assert [names_of(arrival) for arrival in ends.arrivals(2)] == [["a"], ["b"]]


def test_what_is_cancelled_before_it_is_ready_is_never_handed_over(ends: Ends) -> None:
    held = Held()
    ends.connection.listen(held.prepare)
    ends.say(submit_of("1", "hashed", tokens=LONG))
    ends.say(submit_of("2", "waits", tokens=LONG))
    ends.say(submit_of("3", "half", "other half", tokens=LONG))
    ends.say(submit_of("4", "huge", tokens=LONG))
    held.wait_for("hashed")
    cancel = Cancel(["hashed", "waits", "half", "huge", "unknown"])
    ends.say(cancel)
    assert ends.arrivals(1) == [cancel]
    held.goes_on.set()
    ends.say(submit_of("5", "after", tokens=LONG))
    half, after = ends.arrivals(2)
    assert (names_of(half), names_of(after)) == (["other half"], ["after"])
    assert held.asked == ["hashed", "other half", "after"]


def test_what_is_cancelled_while_it_is_hashed_is_taken_out_of_its_submission(ends: Ends) -> None:
    held = Held()
    ends.connection.listen(held.prepare)
    ends.say(submit_of("1", "a", "b", tokens=LONG))
    held.wait_for("b")
    ends.say(Cancel(["a"]))
    assert ends.arrivals(1) == [Cancel(["a"])]
    held.goes_on.set()
    assert [names_of(arrival) for arrival in ends.arrivals(1)] == [["b"]]


def test_nothing_is_kept_of_what_has_been_handed_over_or_cancelled(ends: Ends) -> None:
    ends.connection.listen(prepare)
    for name in ("a", "huge", "b", "c"):
        ends.say(submit_of(name, name, tokens=LONG))
    ends.say(Cancel(["c"]))
    ends.say(submit_of("last", "last", tokens=LONG))
    while "last" not in [getattr(arrival, "submit_id", None) for arrival in ends.arrivals(1)]:
        pass
    reader = ends.connection._reader
    assert (len(reader._short), len(reader._long), reader._unready) == (0, 0, set())


def test_a_long_submission_goes_on_after_every_short_one(ends: Ends) -> None:
    steps: list[str] = []
    has_begun, goes_on = threading.Event(), threading.Event()

    def note(requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        if requests[0].num_prompt_tokens < len(LONG):
            steps.append("short")
            return prepare(requests, rest)
        has_begun.set()
        assert goes_on.wait(10)
        while steps.count("short") < 5 and len(steps) < 10_000:
            steps.append("long")
            rest()
        return prepare(requests, rest)

    ends.connection.listen(note)
    ends.say(submit_of("long", "long", tokens=LONG))
    assert has_begun.wait(10)
    for name in "abcde":
        ends.say(submit_of(name, name, tokens=[1]))
    goes_on.set()
    assert [names_of(arrival)[0] for arrival in ends.arrivals(6)] == ["a", "b", "c", "d", "e", "long"]
    assert ("short", "short") not in itertools.pairwise(steps)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_ends_is_told_of(ends: Ends) -> None:
    ends.connection.listen(prepare)
    ends.say(b"no message")
    with pytest.raises(RuntimeError, match="no request can arrive"):
        ends.arrivals(1)
