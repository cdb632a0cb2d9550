"""What the engine has made before its first request is no business of collections, which would hold up tokens."""

import gc
import io
from types import SimpleNamespace

import pytest

from scheduler.engine import engine_loop


def test_collections_do_not_look_at_what_stands_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []
    connection = SimpleNamespace(listen=lambda prepare: None, send=lambda message: None, close=lambda: None)
    scheduler = SimpleNamespace(intake=SimpleNamespace(prepare=None))
    engine = SimpleNamespace(scheduler=scheduler, shutdown=lambda report: None)
    start = SimpleNamespace(config=None, memory=None, tells_blocks=False)
    for name, instead in {
        "Connection": lambda requests, replies: connection,
        "Heartbeat": lambda replies: SimpleNamespace(start=lambda: None, stop=lambda: None),
        "_read_start": lambda text: start,
        "load_engine": lambda config, memory, on_progress, compiles_ahead, on_rank_end: (engine, "ready"),
        "Stages": lambda send: SimpleNamespace(report=None, describe=lambda: ""),
        "Loop": lambda *given: SimpleNamespace(run=lambda: frozen.append(gc.get_freeze_count())),
        "end_with_parent": lambda *given: None,
    }.items():
        monkeypatch.setattr(engine_loop, name, instead)
    monkeypatch.setattr(engine_loop.signal, "signal", lambda *given: None)
    monkeypatch.setattr(engine_loop.sys, "setswitchinterval", lambda seconds: None)
    monkeypatch.setattr(engine_loop.sys, "stdin", io.StringIO("what is to be served"))
    gc.unfreeze()
    try:
        assert engine_loop.run_engine("requests", "replies", "1") == 0
        assert frozen[0] > 0
    finally:
        gc.unfreeze()
