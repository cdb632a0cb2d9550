"""What the server has made before its first request is no business of collections, which would hold up streams."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest

from server.http import app
from server.planning.deployment_plan import resolve_plan
from tests.server.live_server import make_deployment
from transfer.machine import load_machine

LAPTOP = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json")


def test_collections_do_not_look_at_what_stands_before_the_first_request(monkeypatch: pytest.MonkeyPatch) -> None:
    frozen: list[int] = []

    def run(sockets: list[object]) -> None:
        frozen.append(gc.get_freeze_count())

    monkeypatch.setattr(app.logs, "configure", lambda level: None)  # of this process: other tests read its log
    monkeypatch.setattr(app, "_Program", lambda *_: SimpleNamespace(run=run, failure=None))
    deployment = make_deployment(port=0)
    gc.unfreeze()
    try:
        assert app.serve(deployment, resolve_plan(deployment, LAPTOP).memory) is None
        assert frozen[0] > 0
    finally:
        gc.unfreeze()
