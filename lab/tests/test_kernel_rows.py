"""Rows of `python -m lab kernel`: each passes its gate and reports times; a wrong result gives none."""

import json
import time
from pathlib import Path
from threading import Thread

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from bench.rows import GateError
from lab.cli import app
from lab.kernels import chunk_reads, exchange_hop, fused_rows, simhash_codes
from transfer.chunks.format import ChunkShape
from transfer.exchange import RELEASED, ExchangeError, ExchangeSlot

CPU, QUIET = torch.device("cpu"), Console(quiet=True)


def test_a_hop_row_for_each_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_hop, "ROUNDS", 2)
    rows = exchange_hop.hop_rows((1, 3), CPU, 5, QUIET)
    assert [row.config["rows"] for row in rows] == [1, 3]
    assert all(row.ms > 0 and row.peer_ms > 0 for row in rows)


def test_a_hop_that_brings_another_ask_gives_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def keep_the_old_query(query, codes, counters, slot, *rest):
        counters.add_(1)
        slot.flags.copy_(counters)

    monkeypatch.setattr("gpu.exchange.device_slots.exchange_pack", keep_the_old_query)
    with pytest.raises(GateError, match="hop 2 brought another ask than that of answer 1"):
        exchange_hop.hop_rows((1,), CPU, 5, QUIET)


def in_a_thread(hops: exchange_hop.Hops, await_answer, monkeypatch: pytest.MonkeyPatch) -> list[Thread]:
    """A step that is launched ahead computes beside the host, as a graph does on its device."""
    monkeypatch.setattr("gpu.exchange.device_slots.await_answer", await_answer)
    launched: list[Thread] = []
    whole = hops._whole

    def launch() -> None:
        for before in launched:
            before.join(20)
        launched.append(Thread(target=whole))
        launched[-1].start()

    hops._whole = launch
    return launched


def await_on_the_host(counters: torch.Tensor, slot: ExchangeSlot) -> None:
    deadline = time.monotonic() + 20
    while int(slot.answered) not in (int(counters[0]), RELEASED):
        assert time.monotonic() < deadline, "an answer does not come"
        time.sleep(0)


def test_hops_that_are_launched_ahead_wait_for_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = exchange_hop.Hops(2, CPU)
    launched = in_a_thread(hops, await_on_the_host, monkeypatch)
    exchange_hop.check_hops(hops, goes_ahead=True)
    launched[-1].join(20)
    assert len(launched) == 2
    assert not launched[-1].is_alive()
    exchange_hop.check_hops(hops, goes_ahead=False)


def test_a_device_that_does_not_wait_gives_no_number_and_is_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    hops = exchange_hop.Hops(1, CPU)
    monkeypatch.setattr(exchange_hop, "WAIT_S", 0.1)
    launched = in_a_thread(hops, lambda counters, slot: None, monkeypatch)
    with pytest.raises((GateError, ExchangeError)):
        exchange_hop.check_hops(hops, goes_ahead=True)
    launched[-1].join(20)
    assert hops.slot.is_released


def test_codes_that_are_not_the_plain_ones_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeros(keys, planes, codes):
        codes.view(torch.int16).zero_()

    monkeypatch.setattr(simhash_codes, "encode_keys", zeros)
    with pytest.raises(GateError, match="of the codes are the plain ones"):
        simhash_codes.simhash_rows(600, (1,), 4, 5, CPU, QUIET)


def test_the_commands_report_json_last() -> None:
    asked = ["kernel", "simhash", "--tokens", "600", "--batch", "2", "--bits", "4", "--tables", "5", "--device", "cpu"]
    done = CliRunner().invoke(app, asked)
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout.strip().splitlines()[-1])
    assert [row["name"] for row in rows] == ["simhash of keys", "simhash of queries"]
    done = CliRunner().invoke(app, ["kernel", "hop", "--batch", "1", "--hops", "3", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout.strip().splitlines()[-1])[0]["name"] == "hop behind its answer"


def test_fused_rows_are_timed_beside_a_copy() -> None:
    rows = fused_rows.fused_row_rows(33, CPU, QUIET)
    assert [row.name for row in rows] == ["rows fused", "rows widened"]
    assert all(row.ms > 0 and row.peer_ms > 0 for row in rows)


def test_fused_rows_that_come_back_as_others_give_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_rows, "widen_rows", lambda fused, rows: rows.zero_())
    with pytest.raises(GateError, match="rows come back within"):
        fused_rows.fused_row_rows(33, CPU, QUIET)


SMALL_CHUNKS = ChunkShape(num_layers=2, num_kv_heads=1, dim=8, rows="bfloat16")


def test_chunks_are_read_from_the_page_cache_and_from_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_reads, "measure_host_rates", lambda threads: {"host_stream_gb_s": 10.0})
    rows = chunk_reads.chunk_read_rows(SMALL_CHUNKS, 3, 2, tmp_path, QUIET)
    assert [row.name for row in rows] == ["chunks from the page cache", "chunks from the disk"]
    assert all(row.ms > 0 and row.peer_ms > 0 for row in rows)
    assert rows[0].floor_ms == pytest.approx(2 * 3 * 2 * 2 * 512 * 16 / 10 / 1e6)
    assert list(tmp_path.iterdir()) == []


def test_chunks_that_are_not_stored_give_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_reads, "measure_host_rates", lambda threads: {"host_stream_gb_s": 10.0})
    monkeypatch.setattr("transfer.chunks.folder.ChunkFolder.put", lambda *_: False)
    with pytest.raises(GateError, match="every chunk is stored"):
        chunk_reads.chunk_read_rows(SMALL_CHUNKS, 1, 1, tmp_path, QUIET)
