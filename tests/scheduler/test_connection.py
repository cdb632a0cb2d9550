"""The engine process's sockets: requests are made ready by a thread, in order, and its end is noticed."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from gpu.sampling_params import SamplingParams
from scheduler.capacity import TooLargeError
from scheduler.connection import Arrival, Connection, Prepared
from scheduler.messages import Accepted, Cancel, EngineRequest, FromEngine, Refused, Shutdown, Submit, pack_tokens
from scheduler.sequence import Sequence


def request_of(name: str, prompt: bytes) -> EngineRequest:
    return EngineRequest(
        request_id=name,
        prompt=prompt,
        sampling=SamplingParams(),
        max_tokens=4,
        stop_token_ids=[],
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
    return [Sequence(request, request.prompt, []) for request in requests]


def test_messages_come_in_order_with_their_requests_made_ready(ends: Ends) -> None:
    ends.connection.listen(prepare)
    prompt = pack_tokens([1, 2, 3])
    ends.say(Submit.of("1", [request_of("a", prompt), request_of("b", prompt)]))
    ends.say(Cancel(["a"]))
    ends.say(Submit.of("2", [request_of("huge", prompt)]))
    ends.say(Shutdown())
    ready, cancel, refused, shutdown = ends.arrivals(4)
    assert isinstance(ready, Prepared)
    assert (ready.submit_id, [sequence.request_id for sequence in ready.sequences]) == ("1", ["a", "b"])
    assert ready.sequences[0].prompt is ready.sequences[1].prompt
    assert cancel == Cancel(["a"])
    assert refused == Refused("2", "too_large", "asked 9, have 8")
    assert shutdown == Shutdown()
    ends.connection.send(Accepted("1"))
    assert ends.hear() == Accepted("1")


def test_the_loop_does_not_wait_for_prompts_that_are_being_hashed(ends: Ends) -> None:
    goes_on = threading.Event()
    threads: list[int] = []

    def slow(requests: list[EngineRequest], rest: Callable[[], None]) -> list[Sequence]:
        threads.append(threading.get_ident())
        assert goes_on.wait(10)
        return prepare(requests, rest)

    ends.connection.listen(slow)
    ends.say(Submit.of("1", [request_of("a", pack_tokens([1]))]))
    while not threads:
        time.sleep(0.001)
    assert ends.connection.receive(0.0) == []
    assert threads != [threading.get_ident()]
    goes_on.set()
    assert len(ends.arrivals(1)) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_reader_that_ends_is_told_of(ends: Ends) -> None:
    ends.connection.listen(prepare)
    ends.say(b"no message")
    with pytest.raises(RuntimeError, match="no request can come"):
        ends.arrivals(1)
