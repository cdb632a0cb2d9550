"""The engine process's sign of life."""

import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import zmq

from scheduler.engine.heartbeat import Heartbeat
from scheduler.messages import FromEngine, Pulse

WAIT_MS = 5000


@pytest.fixture
def replies(tmp_path: Path) -> Iterator[zmq.Socket]:
    context = zmq.Context()
    socket = context.socket(zmq.PULL)
    socket.bind(f"ipc://{tmp_path}/replies")
    yield socket
    context.destroy(linger=0)


def next_pulse(replies: zmq.Socket) -> Pulse:
    assert replies.poll(WAIT_MS)
    message = msgspec.msgpack.decode(replies.recv(), type=FromEngine)
    assert isinstance(message, Pulse)
    return message


def test_it_tells_how_long_the_turn_takes_that_is_under_way(replies: zmq.Socket, tmp_path: Path) -> None:
    pulse = Heartbeat(f"ipc://{tmp_path}/replies")
    pulse.start()
    assert next_pulse(replies).turn_seconds == 0.0, "while it loads there are no turns"
    pulse.begin_turn()
    began = time.monotonic()
    first, second = next_pulse(replies), next_pulse(replies)
    assert 0.0 < first.turn_seconds < second.turn_seconds <= time.monotonic() - began
    pulse.begin_turn()
    assert next_pulse(replies).turn_seconds < second.turn_seconds
    pulse.stop()
    while replies.poll(0):
        replies.recv()
    assert not replies.poll(1000)
