"""An engine of several devices that cannot go on says why, and leaves no other rank's memory in use."""

import io
from types import SimpleNamespace

import pytest

from gpu.ranks import RankError
from scheduler.engine import engine_loop, rank_processes
from transfer.host_tier import HostMemoryError


@pytest.mark.parametrize("error", [RankError("rank 0 lost another one (no route)"), HostMemoryError("no room")])
def test_other_ranks_are_gone_when_an_engine_says_why_it_ends(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    done: list[str] = []

    def run() -> None:
        raise error

    def end(replies: str, reason: str) -> None:
        done.append(reason)
        raise SystemExit(1)

    connection = SimpleNamespace(listen=lambda prepare: None, send=lambda message: None)
    scheduler = SimpleNamespace(intake=SimpleNamespace(prepare=None))
    engine = SimpleNamespace(scheduler=scheduler, kill_ranks=lambda: done.append("killed"))
    for name, instead in {
        "Connection": lambda requests, replies: connection,
        "Heartbeat": lambda replies: SimpleNamespace(start=lambda: None),
        "_read_start": lambda text: SimpleNamespace(config=None, memory=None, tells_blocks=False),
        "load_engine": lambda *given, **named: (engine, "ready"),
        "Stages": lambda send: SimpleNamespace(report=None, describe=lambda: ""),
        "Loop": lambda *given: SimpleNamespace(run=run),
        "end_with_parent": lambda *given: None,
        "_end_without_rank": end,
    }.items():
        monkeypatch.setattr(engine_loop, name, instead)
    monkeypatch.setattr(engine_loop.signal, "signal", lambda *given: None)
    monkeypatch.setattr(engine_loop.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(engine_loop.sys, "stdin", io.StringIO("what is to be served"))
    monkeypatch.setattr(engine_loop.gc, "freeze", lambda: None)
    monkeypatch.setattr(rank_processes, "_ROOT_CAUSE_S", 0.0)
    with pytest.raises(SystemExit):
        engine_loop.run_engine("requests", "replies", "1")
    assert done == ["killed", str(error)]
    assert (str(error) in caplog.text) == isinstance(error, RankError), "at once, before another rank's reason is known"
