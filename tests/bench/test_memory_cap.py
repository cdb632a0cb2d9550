"""Benchmarks of small cards hold torch to the limit, less what CUDA takes beside it."""

from types import SimpleNamespace

import pytest
import torch

from bench import long_context
from bench.long_context import LongContextBenchmark, run_long_context_benchmark
from bench.memory_cap import cap_memory
from gpu.memory.demand import CUDA_RUNTIME_BYTES
from transfer.machine import GIB


@pytest.fixture
def fractions(monkeypatch: pytest.MonkeyPatch) -> list[tuple[float, int]]:
    """What is asked of torch, on a card of 140 GiB, the third of several."""
    asked: list[tuple[float, int]] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=140 * GIB))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *told: asked.append(told))
    return asked


def test_the_limit_is_of_all_that_a_process_holds(fractions: list[tuple[float, int]]) -> None:
    """torch refuses a device without an index, so it is told a number."""
    card = torch.device("cuda")
    cap_memory(23 * GIB, card)
    cap_memory(200 * GIB, card)
    cap_memory(23 * GIB, torch.device("cuda:1"))
    cap_memory(23 * GIB, torch.device("cpu"))
    (one, where), (whole, _), (_, other) = fractions
    assert one * 140 * GIB == pytest.approx(23 * GIB - CUDA_RUNTIME_BYTES)
    assert (whole, where, other) == (1.0, 2, 1)


def test_a_long_context_is_measured_within_its_plans_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the engine allocates: here loading ends the run."""

    class LoadedError(Exception):
        pass

    def load(*_: object) -> None:
        raise LoadedError

    plan = SimpleNamespace(device="cuda", limit_bytes={"gpu": 23 * GIB, "host": 99 * GIB})
    capped: list[tuple[int, torch.device]] = []
    monkeypatch.setattr(long_context, "measure_floors", lambda _: SimpleNamespace(plan=plan))
    monkeypatch.setattr(long_context, "layers_as_served", lambda deployment: deployment)
    monkeypatch.setattr(long_context, "resolve_profiles", lambda *_: {})
    monkeypatch.setattr(long_context, "get_profile", lambda *_: None)
    monkeypatch.setattr(long_context, "_announce", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(long_context, "cap_memory", lambda *told: capped.append(told))
    monkeypatch.setattr(long_context, "load_engine", load)
    benchmark = LongContextBenchmark(98_304, 1, (1,), 16, 5.0, ("exact",), 0, False, False)
    with pytest.raises(LoadedError):
        next(run_long_context_benchmark(benchmark, SimpleNamespace(all_profiles={}, host=None), None))
    assert capped == [(23 * GIB, torch.device("cuda"))]
