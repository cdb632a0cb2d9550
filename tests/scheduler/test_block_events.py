"""What changes tell of blocks is what can be found, in each medium, whatever the engine does."""

from collections.abc import Callable, Collection
from pathlib import Path
from random import Random

import numpy as np
import pytest
from msgspec import structs

from scheduler.block_changes import CPU, DISK, GPU, BlocksCleared, BlocksRemoved, BlocksStored
from scheduler.cache.block_events import BlockEvents
from scheduler.cache.page_pool import PagePool
from scheduler.cache.prefix_cache import extend_hashes
from scheduler.engine.engine import Engine
from scheduler.residence.residence import Residence
from tests.scheduler import engines, host_engines
from tests.scheduler.engines import PAGE, make_request, prompt_of, text
from tests.scheduler.test_disk_of_a_model import BLOCK
from tests.scheduler.test_disk_of_a_model import make_engine as make_disk_engine
from tests.scheduler.test_states_of_a_model import ask as ask_model
from tests.scheduler.test_states_of_a_model import draw, serve

MEDIA = (GPU, CPU, DISK)


class Reader:
    """Applies changes as a router does: a block is behind one that it knows, and is stored or removed once."""

    def __init__(self) -> None:
        self.found = {medium: set() for medium in MEDIA}
        self.fronts: dict[bytes, tuple[bytes | None, bytes]] = {}
        self.num_stored = dict.fromkeys(MEDIA, 0)

    def apply(self, changes: list) -> None:
        for one in changes:
            if isinstance(one, BlocksCleared):
                self.found = {medium: set() for medium in MEDIA}
                continue
            blocks = self.found[one.medium]
            if isinstance(one, BlocksRemoved):
                assert blocks.issuperset(one.digests), "only what is there is removed"
                blocks.difference_update(one.digests)
                continue
            assert isinstance(one, BlocksStored)
            assert blocks.isdisjoint(one.digests), "what is there is not stored again"
            blocks.update(one.digests)
            self.num_stored[one.medium] += len(one.digests)
            if one.tokens:
                self._take_tokens(one)

    def _take_tokens(self, one: BlocksStored) -> None:
        size = 4 * one.block_tokens
        assert len(one.tokens) == size * len(one.digests)
        for place, (front, digest) in enumerate(zip([one.parent, *one.digests], one.digests, strict=False)):
            known = (front, one.tokens[place * size : (place + 1) * size])
            assert self.fronts.setdefault(digest, known) == known, "a block has one front and its tokens"

    def prompt_of(self, digest: bytes) -> np.ndarray:
        """Return all tokens to a block's end, as its chain tells them."""
        parts, one = [], digest
        while one is not None:
            one, tokens = self.fronts[one]
            parts.append(tokens)
        return np.frombuffer(b"".join(parts[::-1]), np.int32)


def findable(residence: Residence) -> dict[str, set[bytes]]:
    """Return what can be found, from the pools themselves."""
    resident = set()
    for context in residence.contexts or ():
        own = max(context.size.num_shared, context.num_evicted)
        resident.update(context.hashes[own:] if context.is_findable else ())
    names = set()
    if residence.disk.side is not None:
        files = list(residence.disk.side.store.folder._entries)
        names = {bytes.fromhex(file.split(".")[0]) for file in files if file.endswith(".kv")}
    owners = set() if residence.contexts is None else set(residence.contexts._owners)
    return {GPU: set(residence.pages._page_of) | resident, CPU: owners, DISK: names}


def private(engine: Engine) -> set[bytes]:
    """Return the pages that preempted sequences keep for themselves."""
    return {name for one in engine.scheduler.roster._unfinished.values() for name in one.live}


def check(reader: Reader, events: BlockEvents, residence: Residence, hidden: Collection[bytes] = ()) -> None:
    reader.apply(events.take())
    wanted = findable(residence)
    assert reader.found[GPU] == wanted[GPU].difference(hidden)
    assert reader.found[CPU] == wanted[CPU]
    assert {medium: events.blocks_in(medium) for medium in MEDIA} == reader.found


def play(engine: Engine, ask: Callable, seed: int, profiles: list[str]) -> Reader:
    """Ask for prompts that share fronts, go on with some, cancel others; after each step all is as it is told."""
    random, residence = Random(seed), engine.scheduler.residence
    events, reader = residence.tell_blocks(), Reader()
    histories = [prompt_of(random.randint(20, 400), salt) for salt in range(3)]
    for number in range(14):
        history = random.choice(histories)
        prompt = history[: random.randint(10, len(history))] if random.random() < 0.5 else list(history)
        prompt += prompt_of(random.randint(1, 60), number)
        request = ask(f"r{number}", prompt, random.randint(1, 90), profile=random.choice(profiles))
        if random.random() < 0.2:
            request = structs.replace(request, cache_salt="salt")
        engine.submit([request])
        said = []
        for _ in range(random.randint(5, 400)):
            said += [delta for delta in engine.step() if delta.request_id == f"r{number}"]
            check(reader, events, residence, private(engine))
            if not engine.has_work:
                break
        histories[random.randrange(3)] = prompt + text(said)
        if random.random() < 0.3:
            engine.cancel([f"r{number}"])
        if random.random() < 0.2 and residence.contexts is not None:
            residence.contexts.evict_idle([])
        check(reader, events, residence, private(engine))
    while engine.has_work:
        engine.step()
        check(reader, events, residence, private(engine))
    for digest in reader.found[GPU] | reader.found[CPU]:
        check_name(residence, reader, digest)
    return reader


def check_name(residence: Residence, reader: Reader, digest: bytes) -> None:
    """The tokens that are told of a block are those that it is named by."""
    profiles = {profile.kv_key: profile for profile in [*engines.PROFILES.values(), *host_engines.PROFILES.values()]}
    found = []
    for profile in profiles.values():
        for salt in ("", "salt"):
            extend_hashes(hashes := [], reader.prompt_of(digest), PAGE, residence.prefixes._seed_of(profile, salt))
            found.append(hashes[-1])
    assert digest in found


@pytest.mark.parametrize("seed", range(4))
def test_on_a_card_alone_what_is_told_is_what_is_found(seed: int) -> None:
    engine, _ = engines.make_engine(num_pages=60, max_running=3)
    reader = play(engine, make_request, seed, ["exact", "other"])
    assert reader.num_stored[GPU] > 100
    assert reader.num_stored[CPU] == 0


@pytest.mark.parametrize("kept", [{"num_states": 6, "snapshot_tokens": 32}, {"num_windows": 6}], ids=str)
def test_what_a_preempted_request_keeps_for_itself_is_not_told(kept: dict[str, int]) -> None:
    engine, _ = engines.make_engine(num_pages=36, max_running=3, **kept)
    hidden: set[bytes] = set()
    events, reader = engine.scheduler.residence.tell_blocks(), Reader()
    engine.submit([make_request(f"r{number}", prompt_of(100 + number, number), 150) for number in range(4)])
    while engine.has_work:
        engine.step()
        hidden |= private(engine)
        check(reader, events, engine.scheduler.residence, private(engine))
    assert engine.scheduler.roster.num_preemptions > 0
    assert bool(hidden) == ("num_states" in kept)
    assert reader.num_stored[GPU] > 36


@pytest.mark.parametrize("is_adaptive", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_with_host_memory_what_is_told_is_what_is_found(seed: int, is_adaptive: bool) -> None:
    engine, _ = host_engines.make_engine(num_pages=70, limit_blocks=90, is_adaptive=is_adaptive, max_running=3)
    reader = play(engine, host_engines.ask, seed, ["exact", "whole", "offloaded", "sampled"])
    assert reader.num_stored[CPU] > 20


def test_what_is_evicted_and_reloaded_is_told_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = host_engines.make_engine(num_pages=110, is_adaptive=True)
    residence = engine.scheduler.residence
    events, reader = residence.tell_blocks(), Reader()
    engine.submit([host_engines.ask("a", prompt_of(700), 120)])
    while engine.has_work:
        engine.step()
    check(reader, events, residence)
    in_both = reader.found[GPU] & reader.found[CPU]
    (context,) = list(residence.contexts)
    assert residence.evictor.evict(context, 8)
    check(reader, events, residence)
    assert in_both - reader.found[GPU] == set(context.hashes[:8]) <= reader.found[CPU]
    assert residence.evictor.begin_reload(context, 4, lambda read: True) is not None
    residence.evictor.finish_reload()
    check(reader, events, residence)
    assert set(context.hashes[4:8]) <= reader.found[GPU]


def test_contexts_on_disk_are_told_of_block_by_block_and_after_a_restart_once_they_are_asked_for(
    tmp_path: Path,
) -> None:
    prompt, pages = draw(800, 0), BLOCK // 16
    engine = make_disk_engine(tmp_path)
    events, reader = engine.scheduler.residence.tell_blocks(), Reader()
    request = ask_model("a", prompt, 40)
    known = prompt + serve(engine, [request])[0][0]
    engine.shutdown()
    check(reader, events, engine.scheduler.residence)
    records = findable(engine.scheduler.residence)[DISK]
    assert len(records) > 10
    assert len(reader.found[DISK]) == pages * len(records), "each block of each record"
    assert records <= reader.found[DISK]
    assert all(reader.prompt_of(one).tolist() == known[: len(reader.prompt_of(one))] for one in records)

    engine = make_disk_engine(tmp_path)
    events, reader = engine.scheduler.residence.tell_blocks(), Reader()
    check(reader, events, engine.scheduler.residence)
    assert reader.found[DISK] == records, "nobody knows their tokens yet"
    assert not reader.fronts
    serve(engine, [structs.replace(request, request_id="b")])
    check(reader, events, engine.scheduler.residence)
    assert len(reader.found[DISK]) == pages * len(records)
    folder = engine.scheduler.residence.disk.side.store.folder
    folder.limit_bytes = folder.bytes_held // 2
    folder._make_room(0)
    check(reader, events, engine.scheduler.residence)
    assert len(reader.found[DISK]) == pages * len(findable(engine.scheduler.residence)[DISK]) > 0
    engine.shutdown()


def test_blocks_that_only_their_own_request_may_find_are_not_told_of() -> None:
    pool = PagePool(0, 3, prefix_cache=True)
    pool.events = BlockEvents(2)
    pages = pool.allocate(3)
    pool.events.describe([b"one", b"two"], 0, 2, np.arange(4, dtype=np.int32), 0, "")
    pool.publish([b"one", b"two", b"live"], pages, 0, 3)
    pool.retract(b"live")
    assert pool.events.take() == [
        BlocksCleared(),
        BlocksStored(GPU, [b"one", b"two"], None, np.arange(4, dtype=np.int32).tobytes(), 2),
    ]


def test_blocks_that_are_nowhere_are_forgotten_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.cache.block_events._MOST_UNHELD", 8)
    events = BlockEvents(1)
    for number in range(100):
        digest = b"%d" % number
        events.describe([digest], 0, 1, np.array([number], np.int32), 0, "")
        events.add(GPU, [digest])
        if number:
            events.remove(GPU, [b"%d" % (number - 1)])
    assert len(events._blocks) <= 9 + 1
    assert events.blocks_in(GPU) == {b"99"}
