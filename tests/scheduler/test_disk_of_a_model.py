"""Contexts on disk behind the engine: after a restart a conversation goes on, with the text of a cold server."""

import errno
import itertools
import os
import shutil
import threading
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from msgspec import structs

from gpu.config import ModelConfig
from gpu.memory.demand import PlanError
from gpu.model.architecture import ModelError
from gpu.operations.kv.kv_rows import make_codes, read_codes
from gpu.step import SavedBlock
from scheduler.engine.engine import Engine
from scheduler.messages import AskSessions, Delta
from scheduler.residence.kept_sessions import answer_sessions
from tests.scheduler.engines import drain, text
from tests.scheduler.real_model import load_small
from tests.scheduler.test_states_of_a_model import FEW_TOKENS, ask, converse, draw, serve
from transfer.disk.context_store import ContextStore
from transfer.disk.disk_config import DiskConfig
from transfer.simd.features import HAS_VECTORS

BLOCK, PAGE = 64, 16
FEW_PAGES_GIB = 0.0045  # 1,152 tokens, where the longest context has 1,024 and several run


def make_engine(
    folder: Path | None, pages_gib: float = 0.05, name: str = "tiny", prefix_cache: bool = True, device: str = "cpu",
    kv: str = "auto", dtype: str = "float32", quantised: dict[str, str] | None = None, **disk: Any,
) -> Engine:  # fmt: skip
    settings = {"folder": folder, "block_tokens": BLOCK, "choose": "always"} | disk
    return load_small(
        ModelConfig(random_weights=name, **(quantised or {})),
        {"device": device, "dtype": dtype, "kv_cache_gib": pages_gib, "kv": kv},
        prefix_cache=prefix_cache,
        disk=None if folder is None else DiskConfig(**settings),
    )


def test_after_a_restart_a_prompt_begins_with_what_is_on_disk(tmp_path: Path) -> None:
    prompt = draw(300, 1)
    cold = make_engine(None, prefix_cache=False)
    wanted = serve(cold, [ask("a", prompt, 40)])[0][0]
    first = make_engine(tmp_path)
    assert serve(first, [ask("a", prompt, 40)])[0] == (wanted, 0)
    first.shutdown()
    history = [*prompt, *wanted, *draw(50, 2)]
    second = make_engine(tmp_path)
    told, found = serve(second, [ask("b", history, 40)])[0]
    assert found == (300 + 40 - 1) // BLOCK * BLOCK
    assert told == serve(cold, [ask("b", history, 40)])[0][0]
    second.shutdown()


@pytest.mark.parametrize(
    ("name", "kv"), [("tiny-glm4-moe-lite", "auto"), ("tiny", "int8"), ("tiny-glm4-moe-lite", "fp8")]
)
def test_rows_of_latents_and_of_codes_come_back_as_they_were(name: str, kv: str, tmp_path: Path) -> None:
    prompt, texts = draw(500, 1), []
    for wanted in (0, 448):
        engine = make_engine(tmp_path, name=name, kv=kv)
        told, found = serve(engine, [ask("a", prompt, 20)])[0]
        texts.append(told)
        assert found == wanted
        engine.shutdown()
    assert texts[0] == texts[1]


@pytest.mark.skipif(not HAS_VECTORS, reason="needs a processor whose kernels multiply matrices of few bits")
def test_contexts_of_products_of_floats_are_not_those_of_products_of_integers(tmp_path: Path) -> None:
    prompt = draw(300, 1)
    for products, wanted in (("own", 0), ("auto", 0), ("own", 256), ("integers", 256)):
        engine = make_engine(tmp_path, quantised={"weights": "int8", "products": products})
        assert serve(engine, [ask("a", prompt, 4)])[0][1] == wanted, products
        engine.shutdown()


def pages_of(engine: Engine, prompt: list[int], num_blocks: int) -> list[torch.Tensor]:
    """The rows of a prompt's first KV blocks, keys and values of each layer."""
    (sequence,) = engine.scheduler.intake.prepare([ask("p", prompt, 1)], lambda: None)
    ids = engine.scheduler.residence.pages.find_pages(sequence.hashes[:num_blocks])
    pool = engine._runner.pool
    return [side[layer][ids].clone() for layer in range(4) for side in (pool.key_pages, pool.value_pages)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_rows_in_codes_come_back_as_what_the_codes_say_in_half_the_bytes(device: str, tmp_path: Path) -> None:
    prompt, kept, sizes = draw(500, 1), {}, {}
    for rows in ("same", "int8"):
        engine = make_engine(tmp_path / rows, rows=rows, dtype="bfloat16", device=device)
        serve(engine, [ask("a", prompt, 4)])
        kept[rows] = pages_of(engine, prompt, 448 // PAGE)
        engine.shutdown()
        sizes[rows] = records(tmp_path / rows)[0].stat().st_size
        engine = make_engine(tmp_path / rows, rows=rows, dtype="bfloat16", device=device)
        assert serve(engine, [ask("a", prompt, 4)])[0][1] == 448
        back = pages_of(engine, prompt, 448 // PAGE)
        for now, before in zip(back, kept[rows], strict=True):
            assert before.abs().max() > 0
            on_host = before.cpu()  # where records are made; a card divides otherwise in a scale's last bit
            wanted = on_host if rows == "same" else read_codes(*make_codes(on_host, torch.int8), before.dtype)
            assert torch.equal(now.cpu(), wanted)
            assert torch.equal(now, before) == (rows == "same")
        engine.shutdown()
    dim = kept["same"][0].shape[-1]
    assert sizes["int8"] - 4096 == (sizes["same"] - 4096) * (dim + 4) // (2 * dim)


def test_rows_that_codes_do_not_suit_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"disk\.rows: asked int8, but rows in pages are codes .* use same"):
        make_engine(tmp_path, rows="int8", kv="int8")
    with pytest.raises(PlanError, match=r"disk\.rows: asked int8, but a row of .* joins a latent .* use same"):
        make_engine(tmp_path, rows="int8", name="tiny-glm4-moe-lite")


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("*/*.kv"))


def test_a_session_that_is_forgotten_is_told_of_and_leaves_the_disk_but_for_what_others_begin_with(
    tmp_path: Path,
) -> None:
    engine = make_engine(tmp_path)
    shared = draw(128, 7)
    for name in ("mine", "other"):
        serve(engine, [structs.replace(ask(name, shared + draw(200, len(name)), 4), session=name)])
    engine.scheduler.residence.disk.side.store.run_write(lambda: None).result()  # the last blocks are written
    other, mine = answer_sessions(engine.scheduler.residence, AskSessions("q", "")).conversations
    assert (mine.session, other.session) == ("mine", "other")
    assert mine.disk_tokens == other.disk_tokens == 320
    answer_sessions(engine.scheduler.residence, AskSessions("q", "", "mine"))
    engine.shutdown()
    assert len(records(tmp_path)) == 320 // BLOCK


def hold_up(engine: Engine) -> threading.Event:
    """Have nothing be written until the event is set."""
    go_on = threading.Event()
    engine.scheduler.residence.disk.side.store.run_write(lambda: go_on.wait(30) and None)
    return go_on


def test_a_session_that_is_forgotten_while_it_is_written_leaves_nothing(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, memory_mib=0.001)
    go_on, disk = hold_up(engine), engine.scheduler.residence.disk
    engine.submit([structs.replace(ask("a", draw(300, 1), 4), session="mine")])
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        engine.step()
    engine.step()
    assert disk.side.num_savable() == 0
    assert disk.has_work, "some blocks are on their way, others wait for a buffer"
    answer_sessions(engine.scheduler.residence, AskSessions("q", "", "mine"))
    go_on.set()
    drain(engine)
    engine.shutdown()
    assert records(tmp_path) == []


def test_what_waits_for_a_disk_that_does_not_answer_has_a_bound(
    tmp_path: Path, cold: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.residence.disk_contexts.MOST_UNSAVED", 6)
    monkeypatch.setattr("transfer.disk.context_store.MOST_TOUCHES", 3)
    engine = make_engine(tmp_path, memory_mib=0.001)
    go_on, disk = hold_up(engine), engine.scheduler.residence.disk
    for number in range(20):
        request = ask(f"{number}", draw(200, number % 10), 4)
        engine.submit([request])
        told = []
        while engine.scheduler.roster.num_unfinished or engine._in_flight:
            told += [token_id for delta in engine.step() for token_id in delta.token_ids]
        assert told == serve(cold, [request])[0][0]
    assert len(disk._unsaved) <= 6
    assert len(disk._waiting) <= 6
    assert disk.side.store._writer._work_queue.qsize() <= 2 + 3
    go_on.set()
    drain(engine)
    engine.shutdown()


@pytest.fixture(scope="module")
def cold() -> Engine:
    return make_engine(None, prefix_cache=False)


@pytest.fixture(scope="module")
def cold_texts(cold: Engine) -> list[list[int]]:
    return converse(cold, answers=FEW_TOKENS)[0]


@pytest.mark.parametrize("pages_gib", [pytest.param(0.05, marks=pytest.mark.long), FEW_PAGES_GIB])
def test_turns_and_forks_with_restarts_between_give_the_text_of_a_cold_server(
    pages_gib: float, tmp_path: Path, cold_texts: list[list[int]]
) -> None:
    engine = make_engine(tmp_path, pages_gib)
    told, _ = converse(engine, answers=FEW_TOKENS)
    engine.shutdown()
    again = make_engine(tmp_path, pages_gib)
    told_again, found_again = converse(again, answers=FEW_TOKENS)
    assert told == cold_texts == told_again
    assert min(found_again) >= 240 // BLOCK * BLOCK, "the very first prompt is there, too"
    counts = again.scheduler.residence.disk.side.store.counts()
    assert counts.damaged == counts.refused == 0
    assert counts.written <= 8, "what was there is not written again; ends of answers may be"
    again.shutdown()


def test_what_was_evicted_from_pages_comes_from_the_disk(tmp_path: Path, cold: Engine) -> None:
    engine = make_engine(tmp_path, FEW_PAGES_GIB)
    prompts = [draw(700, number) for number in range(4)]
    for number, prompt in enumerate(prompts):
        serve(engine, [ask(f"a{number}", prompt, 4)])
    for number, prompt in enumerate(prompts):
        request = ask(f"b{number}", [*prompt, *draw(9, 50)], 20)
        told, found = serve(engine, [request])[0]
        assert found >= 640
        assert told == serve(cold, [request])[0][0]
    engine.shutdown()


def test_many_at_once_come_from_the_disk_each_as_alone(tmp_path: Path, cold: Engine) -> None:
    requests = [ask(f"r{number}", draw(200 + 137 * (number % 5), number // 2), 30) for number in range(10)]
    alone = [serve(cold, [request])[0][0] for request in requests]
    for pages_gib in (0.05, FEW_PAGES_GIB):
        engine = make_engine(tmp_path, pages_gib)
        assert [told for told, _ in serve(engine, requests)] == alone
        engine.shutdown()


def seed_folder(folder: Path, prompt: list[int]) -> None:
    engine = make_engine(folder)
    serve(engine, [ask("seed", prompt, 2)])
    engine.shutdown()


@pytest.mark.parametrize("damage", ["flip", "cut", "gone", "swap", "part", "header"])
def test_a_damaged_block_is_a_miss_and_never_another_text(damage: str, tmp_path: Path, cold: Engine) -> None:
    prompt = draw(500, 3)
    seed_folder(tmp_path, prompt)
    wanted = serve(cold, [ask("b", prompt, 8)])[0][0]
    assert len(records(tmp_path)) == 7
    for number in (0, 3, 6) if damage == "flip" else (3,):
        engine = make_engine(tmp_path)
        path = records(tmp_path)[number]
        sound = path.read_bytes()
        if damage == "flip":
            path.write_bytes(sound[:-5] + bytes([sound[-5] ^ 64]) + sound[-4:])
        elif damage == "cut":
            os.truncate(path, len(sound) - 1)
        elif damage == "gone":
            path.unlink()
        elif damage == "swap":
            shutil.copy(records(tmp_path)[(number + 1) % 7], path)
        elif damage == "part":
            path.write_bytes(sound[:4500] + bytes(64) + sound[4564:])
        else:
            engine.shutdown()
            path.write_bytes(b"TANDEMCX" + bytes(len(sound) - 8))
            engine = make_engine(tmp_path)
        told, found = serve(engine, [ask("b", prompt, 8)])[0]
        assert told == wanted
        assert found in range(0, 448, BLOCK), "what is in front of it is used, and counted as it is"
        stats = engine.stats()
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == (500, found)
        engine.shutdown()
        assert len(records(tmp_path)) == 7, "it is computed, and written again"


def test_what_cannot_be_read_for_want_of_open_files_is_computed_and_stays(
    tmp_path: Path, cold: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw(500, 3)
    seed_folder(tmp_path, prompt)
    engine = make_engine(tmp_path)
    is_short = [True]

    def open_file(path: Path, flags: int, *mode: int) -> int:
        if is_short[0] and str(path).endswith(".kv"):
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return open_as_ever(path, flags, *mode)

    open_as_ever = os.open
    monkeypatch.setattr("transfer.disk.record_folder.os.open", open_file)
    wanted = serve(cold, [ask("b", prompt, 8)])[0][0]
    assert serve(engine, [ask("b", prompt, 8)])[0] == (wanted, 0)
    counts = engine.stats().disk
    assert counts.failed > 0
    assert (counts.damaged, len(records(tmp_path))) == (0, 7)
    engine.shutdown()
    is_short[0] = False
    engine = make_engine(tmp_path)
    assert serve(engine, [ask("b", prompt, 8)])[0] == (wanted, 448)
    engine.shutdown()


def test_power_other_rows_under_a_sound_checksum_give_another_text(
    tmp_path: Path, cold: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = draw(500, 3)
    seed_folder(tmp_path, prompt)
    engine = make_engine(tmp_path)
    folder = engine.scheduler.residence.disk.side.store.folder
    read, first = folder.read, records(tmp_path)[0].stem
    monkeypatch.setattr(folder, "read", lambda kind, name, part, out: read(kind, first, part, out))
    assert serve(engine, [ask("b", prompt, 20)])[0][0] != serve(cold, [ask("b", prompt, 20)])[0][0]
    engine.shutdown()


def test_requests_of_other_salts_find_nothing_of_each_other(tmp_path: Path) -> None:
    prompt = draw(300, 5)
    salted = {salt: structs.replace(ask(f"s{salt}", prompt, 4), cache_salt=salt) for salt in ("", "one", "two")}
    engine = make_engine(tmp_path)
    serve(engine, [salted["one"]])
    engine.shutdown()
    engine = make_engine(tmp_path)
    found = {salt: serve(engine, [request])[0][1] for salt, request in salted.items()}
    assert found == {"": 0, "one": 256, "two": 0}
    engine.shutdown()


def test_a_disk_without_room_changes_nothing_but_what_is_written(
    tmp_path: Path, cold_texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path)

    def refuse(*_: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("transfer.disk.record_folder.write_bytes", refuse)
    assert converse(engine, answers=FEW_TOKENS)[0] == cold_texts
    counts = engine.scheduler.residence.disk.side.store.counts()
    assert (counts.written, counts.bytes_held) == (0, 0)
    assert counts.refused > 10
    assert list(tmp_path.glob("*/*.*")) == []
    engine.shutdown()


def first_figures(engine: Engine, prompt: list[int]) -> dict[str, int]:
    engine.submit([ask("f", prompt, 2)])
    return drain(engine)["f"][0].figures


def test_what_is_slower_to_read_than_to_compute_is_neither_read_nor_written_and_told(tmp_path: Path) -> None:
    prompt = draw(500, 3)
    engine = make_engine(tmp_path, choose="time")
    store = engine.scheduler.residence.disk.side.store
    store.rate.bytes_a_second = 1.0
    serve(engine, [ask("a", prompt, 2)])
    serve(engine, [ask("b", [*prompt, *draw(100, 4)], 2)])
    assert records(tmp_path) == []
    engine.shutdown()
    counts = store.counts()
    assert (counts.declined, counts.bytes_written) == (500 // BLOCK + 2, 0), "each block once, when it was computed"
    assert (counts.turns_written[0], counts.turn_bytes) == (2, 0)
    seed_folder(tmp_path, prompt)
    for rate, wanted, passed in ((1.0, 0, {"passed_over_computing_is_faster": 448}), (1e15, 448, {})):
        engine = make_engine(tmp_path, choose="time")
        engine.scheduler.residence.disk.side.store.rate.bytes_a_second = rate
        told = first_figures(engine, prompt)
        assert told["cached_from_disk"] == wanted
        assert {name: number for name, number in told.items() if name.startswith("passed_over")} == passed
        engine.shutdown()
    engine = make_engine(tmp_path)
    engine.scheduler.residence.disk.side.store.folder._fail("too many open files")
    assert first_figures(engine, prompt)["passed_over_reads_paused"] == 448
    engine.shutdown()


def test_each_turn_is_counted_by_the_bytes_that_it_wrote(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, written_gib_a_day=1.0)
    history = draw(300, 3)
    for tail in (0, 100, 10):  # four blocks, two more, none
        serve(engine, [ask("a", [*history, *draw(tail, 5)], 2)])
        history += draw(tail, 5)
    engine.shutdown()
    counts = engine.scheduler.residence.disk.side.store.counts()
    assert (counts.turns_written[0], sum(counts.turns_written)) == (1, 3)
    assert counts.turn_bytes == counts.bytes_written == counts.bytes_today == counts.bytes_held > 0
    assert counts.bytes_a_day == 2**30


def test_a_context_without_finite_logits_leaves_nothing_on_disk(tmp_path: Path) -> None:
    prompt = draw(300, 3)
    seed_folder(tmp_path, prompt)
    engine = make_engine(tmp_path)
    with torch.inference_mode():
        engine._runner.weights.final_norm.fill_(float("nan"))
    engine.submit([ask("b", prompt, 4)])
    assert drain(engine)["b"][-1].finish_reason == "error"
    engine.shutdown()
    assert records(tmp_path) == []


def test_a_context_without_finite_logits_leaves_nothing_that_was_on_its_way(tmp_path: Path) -> None:
    engine, prompt = make_engine(tmp_path), draw(300, 3)
    go_on = hold_up(engine)
    engine.submit([ask("a", prompt, 4)])
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        engine.step()
    engine.step()
    with torch.inference_mode():
        engine._runner.weights.final_norm.fill_(float("nan"))
    engine.submit([ask("b", prompt, 4)])
    assert drain(engine)["b"][-1].finish_reason == "error"
    go_on.set()
    engine.shutdown()
    assert records(tmp_path) == []


def test_counters_only_grow_where_what_a_prompt_began_with_is_damaged(tmp_path: Path) -> None:
    prompt = draw(600, 3)
    seed_folder(tmp_path, prompt)
    raw = bytearray(records(tmp_path)[3].read_bytes())
    raw[-1] ^= 1
    records(tmp_path)[3].write_bytes(raw)
    engine = make_engine(tmp_path)
    engine.submit([ask("b", prompt, 4)])
    told = [(0, 0)]
    while engine.has_work:
        engine.step()
        stats = engine.stats()
        told.append((stats.prefix_queries_tokens, stats.prefix_hits_tokens))
    assert engine.stats().disk.damaged == 1
    assert told[-1][0] == 600
    for before, after in itertools.pairwise(told):
        assert before[0] <= after[0]
        assert before[1] <= after[1]
    engine.shutdown()


def test_a_copy_that_fails_gives_its_buffer_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(tmp_path)
    writer = engine._runner._block_writer
    num_free = writer._free.qsize()

    def fail(*of: object) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(writer, "_gather", fail)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            writer.save([SavedBlock("0" * 32, (0, 1, 2, 3))])
    assert writer._free.qsize() == num_free
    engine.shutdown()


def test_a_limit_that_holds_no_block_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"disk\.limit_gib: asked 1e-05 GiB, a block of 64 tokens .* raise it to"):
        make_engine(tmp_path, limit_gib=1e-5)


def test_two_engines_in_one_folder_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transfer.disk.record_folder.LOCK_SECONDS", 0.1)
    engine = make_engine(tmp_path)
    with pytest.raises(ModelError, match=r"disk\.folder: .* is in use by process"):
        make_engine(tmp_path)
    engine.shutdown()
    make_engine(tmp_path).shutdown()


def test_another_models_blocks_are_not_read(tmp_path: Path) -> None:
    prompt = draw(300, 3)
    seed_folder(tmp_path, prompt)
    other = make_engine(tmp_path, name="tiny-qwen3")
    assert serve(other, [ask("b", prompt, 4)])[0][1] == 0
    other.shutdown()


def test_a_sequence_that_leaves_while_it_is_read_takes_nothing_with_it(tmp_path: Path, cold: Engine) -> None:
    """A read is held up; its request is cancelled; its pages go to another, whose rows nothing overwrites."""
    prompt = draw(600, 3)
    seed_folder(tmp_path, prompt)
    engine = make_engine(tmp_path, FEW_PAGES_GIB, threads=1)
    store, go_on = engine.scheduler.residence.disk.side.store, threading.Event()
    store.run_read(lambda: go_on.wait(20) and None)
    engine.submit([ask("b", prompt, 4)])
    for _ in range(3):
        engine.step()
    assert engine._runner.num_prefill_jobs == 1
    engine.cancel(["b"])
    threading.Timer(0.2, go_on.set).start()
    other = ask("c", draw(900, 8), 30)
    assert serve(engine, [other])[0][0] == serve(cold, [other])[0][0]
    assert engine._runner.num_prefill_jobs == 0
    engine.shutdown()


def test_what_is_left_when_the_engine_ends_is_written_before(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, memory_mib=0.1)
    engine.submit([ask("a", draw(900, 3), 2)])
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        engine.step()
    assert engine.scheduler.residence.disk.has_work, "two buffers at a time"
    engine.shutdown()
    assert len(records(tmp_path)) == 900 // BLOCK


def test_restarts_damage_and_little_room_in_any_order_change_no_text(tmp_path: Path, cold: Engine) -> None:
    """A soak: conversations go on, some are cancelled, files are damaged or gone, and the server starts again."""
    random, histories = Random(5), {number: draw(150 + 90 * number, number) for number in range(3)}
    ends = time.monotonic() + float(os.environ.get("TANDEM_SOAK_SECONDS", "4"))
    limit_gib = 14 * 2**18 / 2**30  # some 13 blocks
    engine, turn, num_found = make_engine(tmp_path, FEW_PAGES_GIB, limit_gib=limit_gib), 0, 0
    while time.monotonic() < ends or turn < 12:
        turn += 1
        names = random.sample(sorted(histories), random.choice((1, 2)))
        requests = [ask(f"t{turn}-{name}", histories[name], random.choice((1, 20, 40))) for name in names]
        lost = ask(f"t{turn}-lost", [*histories[names[0]], *draw(200, turn)], 30)
        engine.submit([*requests, lost])
        deltas: dict[str, list[Delta]] = {}
        for number in range(20_000):
            if number == turn % 6:
                engine.cancel([lost.request_id])
            for delta in engine.step() if engine.has_work else ():
                deltas.setdefault(delta.request_id, []).append(delta)
            if number >= turn % 6 and not engine.has_work:
                break
        for name, request in zip(names, requests, strict=True):
            told = text(deltas[request.request_id])
            num_found += deltas[request.request_id][0].figures.get("cached_from_disk", 0)
            again = structs.replace(request, request_id="cold")
            assert told == serve(cold, [again])[0][0], (turn, name)
            history = [*histories[name], *told, *draw(random.randrange(90), turn)]
            histories[name] = history if len(history) < 790 else draw(200, 100 + turn)  # with what is lost: 1,024
        if random.random() < 0.5:
            engine.shutdown()
            for path in random.sample(records(tmp_path), min(2, len(records(tmp_path)))):
                raw = bytearray(path.read_bytes())
                raw[random.randrange(len(raw))] ^= 1 << random.randrange(8)
                path.write_bytes(raw[: random.choice((len(raw), len(raw), 5000))])
            engine = make_engine(tmp_path, FEW_PAGES_GIB, limit_gib=limit_gib)
        assert sum(path.stat().st_size for path in records(tmp_path)) <= limit_gib * 2**30
    assert num_found > 500
    engine.shutdown()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["tiny", "tiny-qwen3.5"])
def test_on_cuda_after_a_restart_a_prompt_begins_with_what_is_on_disk(name: str, tmp_path: Path) -> None:
    prompt = draw(900, 1)
    first = make_engine(tmp_path, name=name, device="cuda")
    told = serve(first, [ask("a", prompt, 20)])[0][0]
    first.shutdown()
    for folder, wanted in ((tmp_path, 896 if name == "tiny" else 880), (tmp_path / "empty", 0)):
        engine = make_engine(folder, name=name, device="cuda")
        again, found = serve(engine, [ask("b", prompt, 20)])[0]
        assert (again, found >= wanted) == (told, True)
        counts = engine.scheduler.residence.disk.side.store.counts()
        assert (counts.damaged, counts.refused) == (0, 0)
        engine.shutdown()


def test_who_is_cancelled_while_the_disk_does_not_answer_keeps_nobody_waiting(
    tmp_path: Path, cold: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt, other = draw(600, 3), ask("c", draw(900, 8), 30)
    seed_folder(tmp_path, prompt)
    engine = make_engine(tmp_path, FEW_PAGES_GIB)
    store, go_on = engine.scheduler.residence.disk.side.store, threading.Event()
    read, begun = store.read, threading.Event()

    def hang(*of: Any) -> None:
        begun.set()
        assert go_on.wait(60)
        read(*of)

    monkeypatch.setattr(ContextStore, "read", lambda store, *of: hang(*of))
    engine.submit([ask("b", prompt, 4)])
    for _ in range(3):
        engine.step()
    assert begun.wait(60)
    engine.cancel(["b"])
    engine.submit([other])
    told = []
    while engine.scheduler.roster.num_unfinished or engine._in_flight:
        told += [token_id for delta in engine.step() for token_id in delta.token_ids]
    assert not go_on.is_set()
    go_on.set()
    assert told == serve(cold, [other])[0][0]
    drain(engine)
    engine.shutdown()
