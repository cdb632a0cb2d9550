"""An engine process that cannot be given its sockets leaves nothing behind, and says so in one line."""

import asyncio
import errno
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq

from server.engine.engine_run import EngineProcess, EngineStartError
from server.engine.prometheus import Metrics
from server.engine.supervisor import Supervisor
from tests.server.live_server import make_deployment, plan_of


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    made: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield made
    made.destroy(linger=0)


class Failing:
    """Count the steps of a constructor, and fail at one of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
        self.steps, self.fails_at, self.sockets, self._error = 0, 0, [], error
        own: tuple[tuple[Any, str], ...] = (
            (tempfile, "mkdtemp"), (zmq.Context, "socket"), (zmq.Socket, "setsockopt"), (zmq.Socket, "bind"),
        )  # fmt: skip
        for owner, name in own:
            monkeypatch.setattr(owner, name, self._counting(getattr(owner, name)))

    def _counting(self, step: Any) -> Any:
        def counted(*arguments: Any, **named: Any) -> Any:
            self.steps += 1
            if self.steps == self.fails_at:
                raise self._error
            made = step(*arguments, **named)
            self.sockets += [made] if isinstance(made, zmq.Socket) else []
            return made

        return counted


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left"), zmq.ZMQError(errno.ENAMETOOLONG), MemoryError("a fault of ours")]
)
def test_whichever_step_of_the_start_fails_no_folder_and_no_socket_is_left(
    temporary: Path, context: zmq.Context[zmq.Socket[bytes]], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    failing = Failing(monkeypatch, error)
    EngineProcess(context, [], b"").close()
    num_steps = failing.steps
    assert num_steps >= 5, "a folder, two sockets, two addresses"
    for failing.fails_at in range(1, num_steps + 1):
        failing.steps = 0
        with pytest.raises(type(error) if isinstance(error, MemoryError) else EngineStartError) as raised:
            EngineProcess(context, [], b"")
        assert "\n" not in str(raised.value)
        assert all(socket.closed for socket in failing.sockets)
        assert list(temporary.iterdir()) == []


async def test_a_folder_with_too_long_a_path_ends_the_start_with_one_line(temporary: Path) -> None:
    deep = temporary / ("x" * 100)
    deep.mkdir()
    tempfile.tempdir = str(deep)  # the fixture sets it back
    deployment = make_deployment()
    supervisor = Supervisor(deployment, plan_of(deployment), [], Metrics(), lambda _: None)
    supervisor.start()
    assert supervisor.failure is not None
    reason = await asyncio.wait_for(supervisor.failure, 10)
    await supervisor.stop()
    assert reason.startswith("engine: its sockets cannot be made (")
    assert str(deep) in reason
    assert "TMPDIR" in reason
    assert "\n" not in reason
    assert (supervisor.state, list(deep.iterdir())) == ("failed", [])
