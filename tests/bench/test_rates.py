"""Rates: plausible, of real reads, and in the shape that the doctor reads."""

import json
import timeit

import pytest
import torch
from rich.console import Console

import bench.rates
from bench.rates import make_rows, measure_device_rates, rates
from cpu.memory_rates import default_gib, last_level_cache_bytes, measure_host_rates, measure_read_rate
from tests.tolerances import MATMUL_RATE_SPREAD, PLAUSIBLE_RATES_GB_S

SMALL_GIB = 1 / 64
LEAST, MOST = PLAUSIBLE_RATES_GB_S


def test_host_rates_are_plausible() -> None:
    measured = measure_host_rates(1, gib=SMALL_GIB)
    assert set(measured) == {"host_stream_gb_s", "host_random_rows_gb_s"}
    assert all(LEAST < rate < MOST for rate in measured.values())
    assert LEAST < measure_read_rate(1, 1_000_000) < MOST


def test_the_buffer_is_larger_than_the_cache_where_memory_allows() -> None:
    assert default_gib() > 0
    assert last_level_cache_bytes() > 0


def test_a_host_without_a_card_has_its_own_arithmetic_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.rates, "_HOST_MATMUL", 512)
    measured = measure_device_rates(torch.device("cpu"))
    assert set(measured) == {"host_matmul_tflop_s"}
    matrix = torch.randn(512, 512)
    seconds = timeit.timeit(lambda: matrix @ matrix, number=10) / 10
    ratio = measured["host_matmul_tflop_s"] / (2 * 512**3 / seconds / 1e12)
    assert 1 / MATMUL_RATE_SPREAD < ratio < MATMUL_RATE_SPREAD
    assert not 1 / MATMUL_RATE_SPREAD < 1000 * ratio < MATMUL_RATE_SPREAD, "a wrong unit would be seen"


@pytest.mark.gpu
def test_device_rates_are_plausible() -> None:
    measured = measure_device_rates(torch.device("cuda"))
    assert len(measured) == 5
    assert all(LEAST < rate < MOST for rate in measured.values())


def test_rows_say_which_machine_each_rate_is_of() -> None:
    measured = {"host_stream_gb_s": 4.0, "device_stream_gb_s": 2000.0, "host_to_device_gb_s": 25.0,
                "core_int4_gflop_s": 20.0, "bf16_matmul_tflop_s": 500.0}  # fmt: skip
    rows = make_rows(measured, 1, {"host": "a processor", "device": "a card"})
    assert [row.device for row in rows] == ["a processor", "a card", "a card", "a processor", "a card"]
    assert [row.ms for row in rows] == [250.0, 0.5, 40.0, 50.0, 2.0]
    assert [row.shape for row in rows] == ["1 GB", "1 GB", "1 GB", "1 GFLOP", "1 TFLOP"]


def test_the_last_line_is_a_list_of_rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench.rates, "default_gib", lambda: SMALL_GIB)
    monkeypatch.setattr(bench.rates, "measure_device_rates", lambda device: {})
    monkeypatch.setattr(bench.rates, "measure_core_rates", lambda threads, gib: {"core_int4_gflop_s": 20.0 * threads})
    rates(1, None, Console(stderr=True))
    listed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["name"] for row in listed] == ["host_stream_gb_s", "host_random_rows_gb_s", "core_int4_gflop_s"]
