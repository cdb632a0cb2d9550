"""Rows: what is written is what was measured, and nothing is written when the result was wrong."""

import json
from pathlib import Path

import pytest
import torch
from pydantic import ValidationError
from rich.console import Console

from bench.benchmark_rows import GateError, Row, announce, measure, report, require, summarise

ROW = Row(
    name="decode",
    shape="8 rows",
    device="a machine",
    ms=4.0,
    p10=3.0,
    p90=5.0,
    floor="8 GB over 4 GB/ms",
    floor_ms=2.0,
    peer="another engine",
    peer_ms=10.0,
    rates={"host_stream_gb_s": 4.0},
    config={"threads": 2},
)


def test_a_report_writes_a_list_of_rows_and_ends_stdout_with_the_same_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    report([ROW], path, Console())
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert last == json.loads(path.read_text()) == [ROW.model_dump(mode="json")]
    assert {"name", "shape", "device", "ms", "p10", "p90", "floor", "floor_ms", "peer", "peer_ms", "rates"} <= set(
        last[0]
    )


def test_the_table_shows_the_ratios_to_floor_and_peer(capsys: pytest.CaptureFixture[str]) -> None:
    report([ROW], None, Console(width=200))
    table = capsys.readouterr().out
    assert ROW.times_floor == 2.0
    assert ROW.times_faster == 2.5
    assert all(text in table for text in ("2.50", "3.00-5.00", "another engine"))


def test_a_row_without_floor_or_peer_has_no_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    bare = ROW.model_copy(update={"floor_ms": None, "peer": None, "peer_ms": None})
    assert bare.times_floor is None
    assert bare.times_faster is None
    report([bare], None, Console())
    assert json.loads(capsys.readouterr().out.splitlines()[-1])[0]["floor_ms"] is None


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(ValidationError):
        Row.model_validate(ROW.model_dump() | {"milliseconds": 1.0})


def test_a_wrong_result_stops_before_a_number() -> None:
    require(True, "nothing")
    with pytest.raises(GateError, match="3 of 4 tokens"):
        require(False, "3 of 4 tokens")


def test_percentiles_are_of_the_times_given() -> None:
    timing = summarise(list(range(101)))
    assert (timing.p10, timing.ms, timing.p90) == (10.0, 50.0, 90.0)


def test_a_measurement_leaves_the_warm_up_out() -> None:
    calls = []
    measure(lambda: calls.append(len(calls)), torch.device("cpu"), 3, 5)
    assert len(calls) == 8


def test_the_ceiling_is_printed_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    announce(Console(width=200), "decode", ROW.floor, 2.0)
    assert "2.000 ms (8 GB over 4 GB/ms)" in capsys.readouterr().out
