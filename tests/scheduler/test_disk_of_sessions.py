"""Sessions and saved contexts on disk: all of a session can be forgotten, and what has a name stays until it goes."""

import threading
from pathlib import Path

import pytest
from msgspec import structs

from scheduler.engine.engine import Engine
from scheduler.messages import AskSessions, ContextSaved, ReadSaved, SaveContext, Told, pack_tokens
from scheduler.residence.kept_sessions import SessionDesk, answer_sessions, read_saved, save_context
from tests.scheduler import test_disk_of_windows as of_windows
from tests.scheduler.test_disk_of_a_model import BLOCK, make_engine, records
from tests.scheduler.test_states_of_a_model import ask, draw, serve
from transfer.disk.disk_config import DiskConfig
from transfer.disk.holders import Holders, save_holder


@pytest.fixture(scope="module")
def cold() -> Engine:
    return make_engine(None, prefix_cache=False)


def end_writes(engine: Engine) -> None:
    engine.scheduler.residence.disk.side.store.run_write(lambda: None).result()


def sessions_of(engine: Engine) -> set[str]:
    return {one.session for one in answer_sessions(engine.scheduler.residence, AskSessions("q", "")).conversations}


@pytest.mark.parametrize(("session", "restarts"), [("mine", False), ("mine", True), ("", False)])
def test_a_session_that_is_forgotten_leaves_no_branch_of_a_turn_that_was_taken_back(
    session: str, restarts: bool, tmp_path: Path
) -> None:
    engine = make_engine(tmp_path)
    shared = draw(128, 7)
    serve(engine, [structs.replace(ask("other", shared + draw(100, 3), 4), session="other")])
    for seed in (1, 2):  # the second takes back what the first had asked
        serve(engine, [structs.replace(ask(f"t{seed}", shared + draw(190, 5) + draw(200, seed), 4), session=session)])
    serve(engine, [structs.replace(ask("t3", shared + draw(150, 9), 4), session=session)])
    if restarts:
        engine.shutdown()
        engine = make_engine(tmp_path)
        told = answer_sessions(engine.scheduler.residence, AskSessions("q", ""))
        assert told.disk_bytes.keys() == {"mine", "other"}
    else:
        residence = engine.scheduler.residence  # nothing but its note knows of the other one
        residence.conversations.forget(next(iter(residence.conversations)))
    end_writes(engine)
    assert len(records(tmp_path)) >= 12
    for name in {session} if session else sessions_of(engine):
        answer_sessions(engine.scheduler.residence, AskSessions("q", "", name))
    end_writes(engine)
    assert len(records(tmp_path)) == 228 // BLOCK, "the other one's, the shared front with them"
    engine.shutdown()


def save(engine: Engine, name: str, slot: int = 0) -> ContextSaved:
    residence = engine.scheduler.residence
    told = save_context(residence, SaveContext("s", "", name, slot))
    while engine.has_work:
        engine.step()
    end_writes(engine)
    return told or residence.disk.take_saved()[0]


def test_a_saved_context_stays_through_restarts_and_evictions_until_it_is_deleted(tmp_path: Path, cold: Engine) -> None:
    prompt = draw(500, 3)
    engine = make_engine(tmp_path, choose="time")
    engine.scheduler.residence.disk.side.store.rate.bytes_a_second = 1.0  # nothing is written by itself
    said = serve(engine, [structs.replace(ask("a", prompt, 30), session="mine")])[0][0]
    assert records(tmp_path) == []
    told = save(engine, "notes")
    assert (told.code, told.slot, told.num_tokens) == ("", 0, 512)
    block = records(tmp_path)[0].stat().st_size
    assert (told.num_bytes, len(records(tmp_path))) == (8 * block, 8)
    assert save(engine, "x", slot=3).code == "unknown"
    engine.shutdown()
    engine = make_engine(tmp_path, limit_gib=11 * block / 2**30)
    for number in range(4):
        serve(engine, [structs.replace(ask(f"o{number}", draw(700, 20 + number), 2), session="other")])
    end_writes(engine)
    assert engine.stats().disk.bytes_held <= 11 * block
    residence = engine.scheduler.residence
    (one,) = answer_sessions(residence, AskSessions("q", "", "mine")).saved  # its session is forgotten meanwhile
    assert (one.name, one.session, one.tokens, one.disk_tokens) == ("notes", "mine", 530, 512)
    read = read_saved(residence, ReadSaved("q", "", "notes"))
    assert (read.tokens, read.profile) == (pack_tokens([*prompt, *said]), "exact")
    restored = structs.replace(ask("r", [], 0), prompt=read.tokens, session="mine", slot=5)
    assert serve(engine, [restored])[0][1] == 512
    (mine,) = [one for one in answer_sessions(residence, AskSessions("q", "")).conversations if one.session == "mine"]
    assert (mine.slot, mine.device_tokens >= 512) == (5, True)
    further = ask("b", [*prompt, *said, 7], 20)
    told, found = serve(engine, [further])[0]
    assert (told, found >= 512) == (serve(cold, [further])[0][0], True)
    assert read_saved(residence, ReadSaved("q", "you", "notes")).code == "unknown"
    assert not answer_sessions(residence, AskSessions("q", "you", forget_saved="notes")).deleted
    for name in sessions_of(engine):
        answer_sessions(residence, AskSessions("q", "", name))
    end_writes(engine)
    assert len(records(tmp_path)) == 8
    assert answer_sessions(residence, AskSessions("q", "", forget_saved="notes")).deleted
    engine.shutdown()
    assert list(tmp_path.glob("*/*.kv")) == list(tmp_path.glob("*/holders/*")) == []


@pytest.mark.parametrize("name", of_windows.MODELS)
def test_a_context_of_windows_or_states_is_saved_with_its_end(name: str, tmp_path: Path) -> None:
    engine = of_windows.make_engine(tmp_path, name)
    serve(engine, [ask("a", draw(400, 3), 4)])
    told = save(engine, "notes")
    engine.shutdown()
    engine = of_windows.make_engine(tmp_path, name)
    read = read_saved(engine.scheduler.residence, ReadSaved("q", "", "notes"))
    found = serve(engine, [structs.replace(ask("r", [], 0), prompt=read.tokens)])[0][1]
    assert 256 <= found <= told.num_tokens <= 400
    assert answer_sessions(engine.scheduler.residence, AskSessions("q", "", forget_saved="notes")).deleted
    engine.shutdown()


def test_a_context_that_finds_no_room_is_not_saved_and_one_that_finds_some_is_in_part(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    serve(engine, [ask("a", draw(30, 3), 4)])
    assert save(engine, "short").code == "no_room", "it has no whole block"
    serve(engine, [ask("b", draw(500, 4), 4)])
    assert save(engine, "whole", 1).num_tokens == 448
    block = records(tmp_path)[0].stat().st_size
    engine.scheduler.residence.disk.side.store.folder.limit_bytes = 10 * block
    serve(engine, [ask("c", draw(500, 5), 4)])
    assert save(engine, "part", 2).num_tokens == 3 * BLOCK
    serve(engine, [ask("d", draw(500, 6), 4)])
    assert save(engine, "none", 3).code == "no_room"
    engine.shutdown()
    assert save_context(make_engine(None).scheduler.residence, SaveContext("s", "", "x", 0)).code == "no_disk"


@pytest.mark.parametrize("place", [0, 40, -3])
def test_a_note_of_who_holds_what_that_is_damaged_goes_and_hurts_nobody(place: int, tmp_path: Path) -> None:
    prompt = draw(300, 3)
    engine = make_engine(tmp_path)
    serve(engine, [structs.replace(ask("a", prompt, 4), session="mine")])
    assert save(engine, "notes").num_tokens == 256
    engine.shutdown()
    for path in tmp_path.glob("*/holders/*.json"):
        raw = bytearray(path.read_bytes())
        raw[place] ^= 4
        path.write_bytes(raw)
    engine = make_engine(tmp_path)
    told = answer_sessions(engine.scheduler.residence, AskSessions("q", ""))
    assert (told.saved, told.disk_bytes, list(tmp_path.glob("*/holders/*"))) == ([], {}, [])
    assert serve(engine, [ask("b", prompt, 4)])[0][1] == 256
    engine.shutdown()


def run_desk(engine: Engine, desk: SessionDesk) -> list[Told]:
    """Let an engine work until nothing is under way, as its process does."""
    told = desk.take_answers()
    while engine.has_work or engine.scheduler.residence.disk.is_saving:
        engine.step()
        told += desk.take_answers()
    return told + desk.take_answers()


def test_a_save_that_a_delete_comes_behind_is_whole_before_anything_is_forgotten(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, choose="time")
    store = engine.scheduler.residence.disk.side.store
    store.rate.bytes_a_second = 1.0  # nothing is written by itself
    serve(engine, [structs.replace(ask("a", draw(500, 3), 4), session="mine")])
    desk = SessionDesk(engine.scheduler.residence)
    go_on = threading.Event()
    store.run_write(go_on.wait)
    desk.ask(SaveContext("save", "", "notes", session="mine"))
    desk.ask(AskSessions("forget", "", "mine"))
    desk.ask(SaveContext("again", "", "other", session="mine"))
    desk.ask(AskSessions("look", ""))
    assert [one.request_id for one in desk.take_answers()] == ["look"]
    for _ in range(3):
        engine.step()
    assert [one.request_id for one in desk.take_answers()] == []
    go_on.set()
    told = {one.request_id: one for one in run_desk(engine, desk)}
    assert list(told) == ["save", "forget", "again"]
    assert (told["save"].code, told["save"].num_tokens) == ("", 448)
    assert told["forget"].forgotten_tokens > 0
    assert told["again"].code == "unknown"
    end_writes(engine)
    assert len(records(tmp_path)) == 448 // BLOCK
    engine.shutdown()


def test_a_record_that_is_saved_meanwhile_is_not_removed_with_what_was_forgotten_before(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    serve(engine, [structs.replace(ask("a", draw(500, 3), 4), session="mine")])
    end_writes(engine)
    residence = engine.scheduler.residence
    go_on = threading.Event()
    residence.disk.side.store.run_write(go_on.wait)
    (one,) = residence.conversations
    hashes, left = one.hashes, one.left
    answer_sessions(residence, AskSessions("f", "", "mine"))  # its records go once the writer gets there
    one.hashes, one.left = hashes, left
    residence.disk.save(ContextSaved("s"), one, "notes")
    go_on.set()
    told = run_desk(engine, SessionDesk(residence))
    assert (told[0].code, told[0].num_tokens) == ("", 448)
    end_writes(engine)
    assert len(records(tmp_path)) == 448 // BLOCK
    engine.shutdown()


def test_a_key_saves_its_share_and_leaves_that_of_others(tmp_path: Path) -> None:
    engine = make_engine(tmp_path)
    store = engine.scheduler.residence.disk.side.store
    block = store.kv.file_bytes
    store.config = store.config.model_copy(update={"limit_gib": 16 * block / 2**30})
    store.folder.limit_bytes = 16 * block
    desk, told = SessionDesk(engine.scheduler.residence), []
    for owner, number in (("greedy", 0), ("greedy", 1), ("greedy", 2), ("other", 3)):
        request = ask(f"{number}", draw(200, 10 + number), 4)
        serve(engine, [structs.replace(request, owner=owner, session=f"{number}")])
        desk.ask(SaveContext("s", owner, f"n{number}", session=f"{number}"))
        told += run_desk(engine, desk)
    assert [(one.code, one.num_tokens) for one in told] == [("", 192), ("", 64), ("no_share", 0), ("", 192)]
    for number in range(12):  # what is not saved makes room
        serve(engine, [structs.replace(ask("x", draw(300, 50 + number), 2), owner="greedy")])
    end_writes(engine)
    (kept,) = answer_sessions(engine.scheduler.residence, AskSessions("q", "other")).saved
    assert kept.disk_tokens == 192
    assert len(answer_sessions(engine.scheduler.residence, AskSessions("q", "greedy", of_all=True)).saved) == 3
    engine.shutdown()
    assert DiskConfig(limit_gib=8).saved_gib("") == 8
    assert DiskConfig(limit_gib=8, saved_gib_a_key=3).saved_gib("greedy") == 3


def test_keys_have_a_number_of_saved_contexts_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.disk.holders.MOST_SAVED_OF_KEY", 2)
    holders = Holders(tmp_path)
    for number in range(2):
        holders.add(save_holder("one", f"{number}", b"", "exact", ""))
    with pytest.raises(OSError, match="2 contexts are saved, and no more than 2"):
        holders.add(save_holder("one", "third", b"", "exact", ""))
    holders.add(save_holder("one", "1", b"", "exact", ""))
    for number in range(3):
        holders.add(save_holder("", f"{number}", b"", "exact", ""))
