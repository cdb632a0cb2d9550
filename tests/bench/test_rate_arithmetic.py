"""A rate is what was moved over the time that it took: with times that are given, in bytes that are counted by hand."""

import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import bench.rates
import cpu.memory_rates
from bench.benchmark_rows import Timing

MIB = 2**20
CPU = torch.device("cpu")


def seconds_apart(*seconds: float) -> Callable[[], float]:
    """A clock that is asked at the begin and the end of each run: runs take so many seconds."""
    marks = itertools.chain.from_iterable((100.0 * run, 100.0 * run + taken) for run, taken in enumerate(seconds))
    return lambda: next(marks)


def test_the_best_run_counts_and_the_first_one_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.memory_rates.time, "perf_counter", seconds_apart(2.0, 0.5, 4.0))
    reads = []

    def read() -> int:
        reads.append(1)
        return 10**9 // 8

    assert cpu.memory_rates._best_rate(read, 10**9, 3) == pytest.approx(2.0)  # GB/s
    assert len(reads) == 4


def test_a_read_that_leaves_something_out_has_no_rate() -> None:
    with pytest.raises(AssertionError, match="the sum of a buffer of ones"):
        cpu.memory_rates._best_rate(lambda: 10, 8 * 11, 1)


def test_every_way_to_read_reads_each_word_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes of the rates are those of the buffer: words and rows that are all different add up to their sum."""
    words = np.arange(4 * cpu.memory_rates._BLOCK, dtype=np.int64)
    for way in cpu.memory_rates.STREAM_WAYS:
        assert way(words) == words.sum()
    rows = words.reshape(-1, cpu.memory_rates.ROW_BYTES // 8)
    order = np.random.default_rng(0).permutation(len(rows)).astype(np.int32)
    assert cpu.memory_rates._sum_rows(rows, order) == words.sum()


def test_host_rates_are_of_the_whole_buffer_each(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def rate_of(read: Callable[[], int], num_bytes: int, repeats: int) -> float:
        measured.append((8 * int(read()), num_bytes))
        return float(len(measured))

    monkeypatch.setattr(cpu.memory_rates, "_best_rate", rate_of)
    rates = cpu.memory_rates.measure_host_rates(1, gib=1 / 256)
    assert measured == [(4 * MIB, 4 * MIB)] * 4
    assert rates == {"host_stream_gb_s": 3.0, "host_random_rows_gb_s": 4.0}, "the best stream, then rows"


@pytest.mark.parametrize(
    ("cache_gib", "available_gib", "wanted"), [(1 / 32, 64, 1.0), (1.0, 64, 4.0), (1.0, 8, 2.0), (1 / 32, 1, 0.25)]
)
def test_the_buffer_is_four_caches_and_at_least_a_gib_but_a_quarter_of_what_is_free(
    monkeypatch: pytest.MonkeyPatch, cache_gib: float, available_gib: float, wanted: float
) -> None:
    memory = SimpleNamespace(available=available_gib * cpu.memory_rates.GIB)
    monkeypatch.setattr(cpu.memory_rates, "last_level_cache_bytes", lambda: int(cache_gib * cpu.memory_rates.GIB))
    monkeypatch.setattr(cpu.memory_rates.psutil, "virtual_memory", lambda: memory)
    assert cpu.memory_rates.default_gib() == wanted


@pytest.fixture
def half_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is timed runs once, and took 500 ms."""

    def time_once(call: Callable[[], object], device: torch.device) -> Timing:
        call()
        return Timing(500.0, 500.0, 500.0)

    monkeypatch.setattr(bench.rates, "_time", time_once)


@pytest.mark.usefixtures("half_a_second")
def test_device_rates_are_of_the_bytes_that_cross(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 256 MiB that are free a quarter is used: one half is copied to the other, and one crosses the link."""
    ones = torch.ones

    def unpinned(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return ones(*args, **more)

    monkeypatch.setattr(bench.rates.torch, "ones", unpinned)
    monkeypatch.setattr(bench.rates.torch.cuda, "mem_get_info", lambda device: (256 * MIB, 0))
    monkeypatch.setattr(bench.rates, "_stream_rate", lambda buffer, device: float(buffer.nbytes))
    rates = bench.rates._measure_memory(CPU)
    assert rates["device_stream_gb_s"] == 64 * MIB
    assert rates["device_copy_gb_s"] == pytest.approx((32 + 32) * MIB / 0.5 / 1e9)  # read and written
    assert rates["host_to_device_gb_s"] == pytest.approx(32 * MIB / 0.5 / 1e9)
    assert rates["device_to_host_gb_s"] == pytest.approx(32 * MIB / 0.5 / 1e9)


@pytest.mark.usefixtures("half_a_second")
def test_a_product_of_matrices_is_a_multiplication_and_an_addition_a_term(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench.rates, "_MATMUL", 100)
    assert bench.rates._matmul_rate(CPU) == pytest.approx(2e6 / 0.5 / 1e12)


@pytest.mark.parametrize(("glimpse", "wanted", "timed"), [(0.2, 1.0, 1), (0.3, 2.0, 2)])
def test_a_type_that_is_far_behind_in_small_products_is_not_timed_in_large_ones(
    monkeypatch: pytest.MonkeyPatch, glimpse: float, wanted: float, timed: int
) -> None:
    rates = {(torch.float32, 256): 1.0, (torch.float32, 1024): 1.0, (torch.bfloat16, 256): glimpse}
    rates[torch.bfloat16, 1024] = 2.0
    asked = []
    monkeypatch.setattr(bench.rates, "_host_matmul_rate", lambda *which: asked.append(which) or rates[which])
    assert bench.rates.measure_host_matmul((torch.float32, torch.bfloat16)) == wanted
    assert sum(size == 1024 for _, size in asked) == timed


def test_a_stream_reads_its_buffer_once_and_the_best_way_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([400.0, 250.0, 300.0, 500.0])

    def next_time(call: Callable[[], object], device: torch.device) -> Timing:
        call()
        ms = next(times)
        return Timing(ms, ms, ms)

    def sum_on_host(values: torch.Tensor, partial_sums: torch.Tensor, block: int, num_warps: int) -> None:
        partial_sums.zero_()[0] = values.sum()

    monkeypatch.setattr(bench.rates, "_time", next_time)
    monkeypatch.setattr(bench.rates, "sum_stream", sum_on_host)
    properties = SimpleNamespace(multi_processor_count=2)
    monkeypatch.setattr(bench.rates.torch.cuda, "get_device_properties", lambda device: properties)
    buffer = torch.ones(MIB, dtype=torch.int32)
    assert bench.rates._stream_rate(buffer, CPU) == pytest.approx(4 * MIB / 0.25 / 1e9)
