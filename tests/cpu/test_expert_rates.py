"""A core's rate is of the experts' own kernels: two operations a number, each thread's part of the fastest ask."""

from types import SimpleNamespace
from typing import Any

import pytest

import cpu.expert_rates
from cpu.expert_rates import HIDDEN, INTERMEDIATE, PER_TOKEN, measure_core_rates
from cpu.experts import HostExperts
from transfer.expert_exchange import LayerExperts
from transfer.host_tier import Answered
from transfer.machine_rates import STORED_AS
from transfer.matrix_rows import nbytes_of

GIB = 1 / 12
RUNS_S = (0.1, 0.5, 0.4, 0.8, 0.7, 0.6)  # of a host request; those of the first run are not measured
BYTES_OF = {
    "bf16": 2.0,
    "fp4": 17 / 32,
    "int4": 37 / 64,
    "int8": 34 / 32,
    "fp8": 1 + 4 * (2 / HIDDEN + 1 / INTERMEDIATE) / 3,
}


class Clocked(HostExperts):
    """Computes, and tells its time by RUNS_S."""

    opened: "list[Clocked]" = []

    def __init__(self, layers: list[LayerExperts], *sizes: Any) -> None:
        super().__init__(layers, *sizes)
        (self.layer,), self.taken, self.opened[:] = layers, [], [self]

    def answer(self, parts: Any) -> Answered:
        ((_, slot),) = parts
        super().answer(parts)
        run = len(self.taken) // self.layer.count
        self.taken += slot.experts[0].tolist()
        return Answered(0.0, RUNS_S[run])


@pytest.mark.parametrize("stored", STORED_AS)
def test_a_rate_is_of_the_fastest_ask_of_runs_over_every_expert(stored: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.expert_rates, "HostExperts", Clocked)
    ((name, rate),) = measure_core_rates(2, gib=GIB, stored=[stored]).items()
    (worker,) = Clocked.opened
    count, layer = worker.layer.count, worker.layer
    each = 3 * HIDDEN * INTERMEDIATE
    assert (nbytes_of(layer.gate_up) + nbytes_of(layer.down)) / count == pytest.approx(each * BYTES_OF[stored])
    assert count == max(1, int(GIB * 2**30 / (PER_TOKEN * each * BYTES_OF[stored]))) * PER_TOKEN
    assert name == f"core_{stored}_gflop_s"
    assert rate == pytest.approx(2 * each * PER_TOKEN / 0.4 / 2 / 1e9)
    runs = [sorted(worker.taken[begin : begin + count]) for begin in range(0, len(worker.taken), count)]
    assert runs == [list(range(count))] * len(RUNS_S)
    assert worker.taken[:count] != list(range(count)), "in no order"


def test_threads_are_those_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.expert_rates, "HostExperts", Clocked)
    monkeypatch.setattr(cpu.expert_rates, "numba", SimpleNamespace(config=SimpleNamespace(NUMBA_NUM_THREADS=1)))
    (many,) = measure_core_rates(64, gib=GIB, stored=["fp8"]).values()
    (one,) = measure_core_rates(1, gib=GIB, stored=["fp8"]).values()
    assert many == one


def test_a_processor_without_the_vectors_has_no_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.expert_rates, "HAS_VECTORS", False)
    assert measure_core_rates(1) == {}
