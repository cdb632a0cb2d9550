"""The end of one of several engines: what it has on its way to the disk, its faults, and what is asked of it then."""

import asyncio
import contextlib
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from server.engine import engine_end
from server.planning.side_by_side import Room
from tests.server.live_server import Running, running_server, with_documents
from tests.server.test_several_models import (
    NAMES,
    PROMPT,
    command_of,
    complete,
    make_models,
    models_of,
    states_of,
    text_of,
)
from transfer.disk.disk_config import DiskConfig
from transfer.disk.holders import Holder, Holders, read_holders, save_holder

SIDE_BY_SIDE = Room({}, is_shared=True)


@pytest.fixture
def is_hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines wait for less before they are killed: an engine that writes for a second writes for long."""
    monkeypatch.setattr(engine_end, "WRITE_PATIENCE_S", 0.4)
    monkeypatch.setattr("server.engine.supervisor.EXIT_SECONDS", 0.4)


def on_disk(folder: Path, *names: str, end_seconds: float = 60.0, **server: object):
    disk = DiskConfig(folder=folder, end_seconds=end_seconds)
    return [one.model_copy(update={"disk": disk}) for one in make_models(*names, **server)]


def writer(tmp_path: Path, **settings: object) -> dict[str, Any]:
    return {"a": {"written": str(tmp_path / "written"), **settings}}


async def until_ending(live: Running, name: str) -> None:
    async def is_writing() -> bool:
        return bool(models_of(live)[name].supervisor.ending)

    await live.until(is_writing)


async def test_an_engine_that_writes_is_waited_for_and_requests_are_told(tmp_path: Path, is_hurried: None) -> None:
    first, second = on_disk(tmp_path, "a", "b", keepalive_seconds=0.05)
    async with running_server(first, command_of(writer(tmp_path, write_s=1.2)), others=[second]) as live:
        body = {"model": "b", "prompt": PROMPT, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "stream": True}
        asked = asyncio.create_task(live.http.post("/v1/completions", json=body))
        await until_ending(live, "a")
        assert (await states_of(live))["a"] == "unloading"
        late = await complete(live, "a", max_seconds=0.05)
        assert "it is unloaded, and loaded again then; it writes its contexts to disk" in late.text
        text = (await asked).text
        assert (tmp_path / "written").exists(), "it has written for three times as long as it may be silent"
        said = [line for line in text.splitlines() if line.startswith(": b: another")]
        assert any("and writes its contexts to disk, 1 MiB left" in line for line in said), said


async def test_other_models_are_served_and_let_in_while_one_writes(tmp_path: Path, is_hurried: None) -> None:
    first, *others = on_disk(tmp_path, *NAMES)
    command = command_of(writer(tmp_path, write_s=1.5))
    async with running_server(first, command, others=others, room=SIDE_BY_SIDE) as live:
        await complete(live, "b")
        await complete(live, "a", keep_alive=0)
        await until_ending(live, "a")
        for name in ("b", "c"):
            assert (await complete(live, name)).json()["choices"][0]["text"] == text_of(live.service, name, 8)
        assert not (tmp_path / "written").exists(), "c was loaded meanwhile"
        assert (await complete(live, "a")).status_code == 200
        assert (tmp_path / "written").exists(), "it is loaded again behind that"


async def test_an_engine_whose_writing_stands_still_is_killed(tmp_path: Path, is_hurried: None) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    async with running_server(first, command_of(writer(tmp_path, write_s=60, stuck=1)), others=[second]) as live:
        began = time.monotonic()
        assert (await complete(live, "b")).status_code == 200
        assert time.monotonic() - began < 5
        assert not (tmp_path / "written").exists()


async def test_writing_has_a_limit(tmp_path: Path, is_hurried: None) -> None:
    first, second = on_disk(tmp_path, "a", "b", end_seconds=0.3)
    async with running_server(first, command_of(writer(tmp_path, write_s=60)), others=[second]) as live:
        began = time.monotonic()
        assert (await complete(live, "b")).status_code == 200
        assert 0.5 < time.monotonic() - began < 5


async def test_a_server_that_ends_waits_for_an_unload_that_has_begun(tmp_path: Path, is_hurried: None) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    async with running_server(first, command_of(writer(tmp_path, write_s=1.0)), others=[second]) as live:
        live.app.state.models.end_by(time.monotonic() + 20)
        await complete(live, "a", keep_alive=0)
        await until_ending(live, "a")
    assert (tmp_path / "written").exists()


async def test_a_server_that_ends_waits_no_longer_than_its_drain(tmp_path: Path, is_hurried: None) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    async with running_server(first, command_of(writer(tmp_path, write_s=60)), others=[second]) as live:
        await complete(live, "a", keep_alive=0)
        await until_ending(live, "a")
        live.app.state.models.end_by(time.monotonic() + 0.5)
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not (tmp_path / "written").exists()


async def test_a_fault_in_what_keeps_one_engine_ends_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_models("a", "b")
    async with running_server(first, command_of(), others=[second], room=SIDE_BY_SIDE) as live:
        await complete(live, "b")
        b = models_of(live)["b"]
        long = asyncio.create_task(complete(live, "a", 300))
        with monkeypatch.context() as patch:
            patch.setattr(b.supervisor, "_answer", lambda *_: 1 / 0)
            lost = await complete(live, "b")
            assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_dead")
            await live.until(lambda: _holds(not b.is_started))
        refused = await complete(live, "b")
        assert "'b' could not be loaded: supervisor: ZeroDivisionError: division by zero" in refused.text
        assert (await long).json()["choices"][0]["text"] == text_of(live.service, "a", 300)
        b.retry_s = 0.0
        assert (await complete(live, "b")).json()["choices"][0]["text"] == text_of(live.service, "b", 8)
        assert not live.app.state.models.failure.done()


async def test_an_engine_that_cannot_be_ended_as_it_should_hinders_no_other(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, *others = make_models(*NAMES)
    async with running_server(first, command_of(), others=others, room=SIDE_BY_SIDE) as live:
        await complete(live, "b")
        await complete(live, "c")
        models = models_of(live)
        pids = [model.supervisor.engine_pid for model in models.values()]
        with monkeypatch.context() as patch:
            patch.setattr(models["a"].supervisor, "_end_engine", lambda _: 1 / 0)
            await complete(live, "a", keep_alive=0)
            await live.until(lambda: _holds(not models["a"].is_started))
        assert not psutil.pid_exists(pids[0]) or psutil.Process(pids[0]).status() == psutil.STATUS_ZOMBIE
        assert (await complete(live, "a")).status_code == 200
        monkeypatch.setattr(models["b"].supervisor, "_end_engine", lambda _: 1 / 0)
        pids = [model.supervisor.engine_pid for model in models.values()]
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(pid).wait(timeout=5)


async def _holds(what: bool) -> bool:
    return what


async def test_lists_of_an_unloaded_model_are_read_from_its_disk_and_load_nothing(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    contexts = tmp_path / "of-a"
    async with running_server(first, command_of({"a": {"contexts": str(contexts)}}), others=[second]) as live:
        contexts.mkdir()
        holders = Holders(contexts)
        (contexts / "11.kv").write_bytes(b"x" * 500)
        saved = save_holder("", "notes", b"\1\0\0\0" * 7, "exact", "mine")
        saved.records = {"11.kv", "22.kv"}
        holders.add(saved)
        holder = holders.note("", "mine", {"11.kv"})
        assert isinstance(holder, Holder)
        holders.write(holder)
        await complete(live, "b")
        assert await states_of(live) == {"a": "unloaded", "b": "loaded"}
        sessions = (await live.http.get("/v1/sessions", params={"model": "a"})).json()
        assert sessions["data"] == [{"id": "mine", "object": "session", "conversations": [], "disk_bytes": 500}]
        [told] = (await live.http.get("/v1/saved_contexts", params={"model": "a"})).json()["data"]
        assert (told["id"], told["tokens"], told["disk_tokens"], told["disk_bytes"]) == ("notes", 7, 256, 500)
        assert (await live.http.get("/slots", params={"model": "a"})).json() == []
        assert await states_of(live) == {"a": "unloaded", "b": "loaded"}


async def test_what_is_forgotten_of_an_unloaded_model_leaves_its_disk(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    contexts = tmp_path / "of-a"
    async with running_server(first, command_of({"a": {"contexts": str(contexts)}}), others=[second]) as live:
        contexts.mkdir()
        holders = Holders(contexts)
        for record in ("11.kv", "22.kv", "33.kv"):
            (contexts / record).write_bytes(b"x" * 500)
        saved = save_holder("", "notes", b"\1\0\0\0" * 7, "exact", "mine")
        saved.records = {"11.kv", "22.kv"}
        holders.add(saved)
        for owner, records in (("", {"11.kv", "33.kv"}), ("another key", {"33.kv"})):
            holder = holders.note(owner, "mine", records)
            assert holder is not None
            holders.write(holder)
        await complete(live, "b")

        async def delete(path: str) -> int:
            return (await live.http.delete(path, params={"model": "a"})).status_code

        assert await delete("/v1/sessions/mine") == 200
        assert {path.name for path in contexts.glob("*.kv")} == {"11.kv", "22.kv", "33.kv"}, "others hold them"
        assert await delete("/v1/sessions/mine") == 404
        assert await delete("/v1/saved_contexts/notes") == 200
        assert await delete("/v1/saved_contexts/notes") == 404
        assert {path.name for path in contexts.glob("*.kv")} == {"33.kv"}
        assert [holder.owner for holder in read_holders(contexts)] == ["another key"]
        assert await states_of(live) == {"a": "unloaded", "b": "loaded"}


async def test_a_list_loads_no_model_and_what_saves_and_restores_does(tmp_path: Path) -> None:
    first, second = on_disk(tmp_path, "a", "b")
    command = command_of({"b": {"contexts": str(tmp_path / "of-b"), "disk": 1}})
    async with running_server(first, command, others=[second]) as live:
        for method, path in (("GET", "/v1/sessions"), ("GET", "/slots"), ("DELETE", "/v1/saved_contexts/none")):
            unknown = await live.http.request(method, path, params={"model": "b"})
            assert (unknown.status_code, unknown.json()["error"]["code"]) == (503, "engine_unloaded")
        assert await states_of(live) == {"a": "loaded", "b": "unloaded"}
        body = {"filename": "none"}
        answer = await live.http.post("/slots/0", params={"model": "b", "action": "restore"}, json=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "context_not_found"), answer.text
        assert (await states_of(live))["b"] == "loaded"


async def test_a_deleted_document_leaves_the_chunks_of_every_model_that_shares_them(tmp_path: Path) -> None:
    """Of one that is not loaded, as soon as it is."""
    folder, other = tmp_path / "chunks", tmp_path / "others"
    a, b, c = make_models(*NAMES)
    first, second, third = with_documents(a, folder), with_documents(b, folder), with_documents(c, other)
    async with running_server(first, command_of(), others=[second, third], room=SIDE_BY_SIDE) as live:

        async def store(model: str) -> dict[str, Any]:
            stored = await live.http.post("/v1/documents", json={"model": model, "text": PROMPT})
            assert stored.status_code == 200, stored.text
            return stored.json()

        kept = {name: await store(name) for name in NAMES}
        assert all(one["num_stored"] == 1 for one in kept.values())
        assert (await store("b"))["num_known"] == 1
        gone = await live.http.delete(f"/v1/documents/{kept['a']['id']}", params={"model": "a"})
        assert gone.json()["deleted"]
        assert (await store("b"))["num_stored"] == 1, "the running engine was told"
        assert (await store("c"))["num_known"] == 1, "its chunks are elsewhere"
        dropped: list[int] = []
        supervisor = models_of(live)["b"].supervisor
        await complete(live, "b", keep_alive=0)
        await live.until(lambda: _holds(not models_of(live)["b"].is_started))
        await live.http.delete(f"/v1/documents/{kept['a']['id']}", params={"model": "a"})
        dropped.append(len(supervisor._undropped))
        await complete(live, "b")
        dropped.append(len(supervisor._undropped))
        assert dropped == [1, 0], "named until it was there"
