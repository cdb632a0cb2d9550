"""Contexts of which a part is in host memory go to the disk and come back from there, through every residency."""

import threading
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from gpu.config import Composition
from scheduler.engine.engine import Engine
from tests.scheduler.real_model import load_small
from tests.scheduler.test_states_of_a_model import ask, draw, serve
from transfer.disk.disk_config import DiskConfig
from transfer.host_config import HostConfig, SampledConfig

BLOCK = 64
PROFILES = {
    "reusing": {"reuse": {"method": "mac", "min_context_tokens": 100}, "host": "offloaded"},
    "blocks": {"host": {"method": "indexed", "min_context_tokens": 100}},
}


def make_engine(
    folder: Path | None, residency: str = "adaptive", pages_gib: float = 0.02, prefix_cache: bool = True, **host: Any
) -> Engine:
    settings = {"memory_limit_gib": 0.25, "resident_tokens": 256, "residency": residency, "threads": 1} | host
    return load_small(
        "tiny", {"kv_cache_gib": pages_gib}, max_running=3, max_context_tokens=2048, prefix_cache=prefix_cache,
        host=HostConfig(**settings, sampled=SampledConfig(bits_per_table=6, num_tables=20)),
        profiles={name: Composition.model_validate(tree) for name, tree in PROFILES.items()},
        disk=None if folder is None else DiskConfig(folder=folder, block_tokens=BLOCK, choose="always"),
    )  # fmt: skip


def converse(folder: Path | None, profile: str, turns: int = 3, restarts: bool = True, **how: Any):
    """Turns of a conversation that outgrows the device: texts, cached tokens, and where these came from."""
    history, texts, found = draw(1100, 0), [], []
    engine = make_engine(folder, **how)
    for turn in range(turns):
        if turn and restarts:
            engine.shutdown()
            engine = make_engine(folder, **how)
        request = structs.replace(ask(f"t{turn}", history, 40), attention_profile=profile)
        told, cached = serve(engine, [request])[0]
        texts.append(told)
        found.append(cached)
        history = [*history, *told, *draw(60, 5 + turn)]
    counts = None if folder is None else engine.scheduler.residence.disk.side.store.counts()
    engine.shutdown()
    return texts, found, counts


@pytest.fixture(scope="module")
def cold() -> list[list[int]]:
    return converse(None, "exact", restarts=False, prefix_cache=False)[0]


@pytest.mark.parametrize(("residency", "pages_gib"), [("adaptive", 0.0105), ("fixed", 0.02)], ids=str)
def test_after_restarts_a_context_goes_on_from_the_disk(
    residency: str, pages_gib: float, tmp_path: Path, cold: list[list[int]]
) -> None:
    texts, found, counts = converse(tmp_path, "offloaded", residency=residency, pages_gib=pages_gib)
    assert texts == cold
    assert found[0] == 0
    assert found[1] >= 1100 - 64 - BLOCK, "all but a window, and what is behind the last block"
    assert found[2] >= found[1] + 40
    assert counts is not None
    assert counts.damaged == counts.refused == 0


@pytest.mark.parametrize("profile", ["sampled", "reusing", "blocks"])
def test_what_methods_read_of_the_host_is_there_again(profile: str, tmp_path: Path) -> None:
    """Tables and the rest are built of rows that came from the disk; a turn without them would fail."""
    texts, found, counts = converse(tmp_path, profile, residency="fixed")
    assert found[2] > found[1] >= 1100 - 64 - BLOCK
    assert [len(text) for text in texts] == [40] * 3
    assert counts is not None
    assert counts.bytes_read > 0


@pytest.mark.parametrize("rows", ["bfloat16", "int8"])
def test_evicted_rows_go_to_the_disk_as_pages_would_have_them(rows: str, tmp_path: Path, cold: list[list[int]]) -> None:
    """Parts of blocks are evicted, others are not; what is read again is near, by how the host rounds."""
    engine = make_engine(tmp_path, pages_gib=0.0105, rows=rows)
    first = structs.replace(ask("a", draw(1100, 0), 40), attention_profile="offloaded")
    serve(engine, [first])
    others = [structs.replace(ask(f"o{n}", draw(900, 9 + n), 4), attention_profile="offloaded") for n in range(2)]
    serve(engine, others)
    assert engine.scheduler.residence.contexts.num_evicted > 0
    engine.shutdown()
    engine = make_engine(tmp_path, rows=rows)
    told, found = serve(engine, [structs.replace(first, request_id="b")])[0]
    assert found >= 960
    engine.shutdown()
    if rows == "bfloat16":
        assert told == cold[0]


def test_rows_are_lent_until_they_are_written_though_their_context_closes(
    tmp_path: Path, cold: list[list[int]]
) -> None:
    engine = make_engine(tmp_path, residency="fixed")
    store, go_on = engine.scheduler.residence.disk.side.store, threading.Event()
    store.run_write(lambda: go_on.wait(30) and None)
    first = structs.replace(ask("a", draw(1100, 0), 40), attention_profile="offloaded")
    engine.submit([first])
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        engine.step()
    while engine.has_work:  # blocks are taken, two by a plan
        engine.step()
    contexts = engine.scheduler.residence.contexts
    while contexts.evict_idle([]):
        pass
    for _ in range(3):
        engine.step()
    assert engine._tier.stats().contexts == 0
    assert engine._tier.stats().bytes_in_use > 0
    go_on.set()
    serve(engine, [ask("c", draw(20, 3), 2)])
    engine.shutdown()
    engine = make_engine(tmp_path, residency="fixed")
    told, found = serve(engine, [structs.replace(first, request_id="b")])[0]
    assert (told, found >= 960) == (cold[0], True)
    engine.shutdown()


def test_a_damaged_block_of_an_offloaded_prompt_is_computed_anew(
    tmp_path: Path, cold: list[list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    first = structs.replace(ask("a", draw(1100, 0), 40), attention_profile="offloaded")
    engine = make_engine(tmp_path, residency="fixed")
    serve(engine, [first])
    engine.shutdown()
    engine = make_engine(tmp_path, residency="fixed")
    for path in sorted(tmp_path.glob("*/*.kv"))[::5]:
        raw = bytearray(path.read_bytes())
        raw[-1] ^= 1
        path.write_bytes(raw)
    told, found = serve(engine, [structs.replace(first, request_id="b")])[0]
    assert told == cold[0]
    assert found < 1024
    assert engine.scheduler.residence.disk.side.store.counts().damaged > 0
    preempted = [line for record in caplog.records if (line := record.getMessage()).startswith("preempted ")]
    assert preempted == ["preempted request=b priority=0 reason=disk_blocks_lost context_tokens=1100"]
    assert engine.stats().preemptions == 1
    engine.shutdown()
