"""The bound of the gate: the device's distance from itself and a rounding, and narrower than what one fault moves."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

import bench.long_gate
from bench.benchmark_rows import GateError
from bench.long_gate import Agreement, check_host_path
from gpu.page_layout import KvFormat, PageLayout
from gpu.profiles import resolve_profiles
from scheduler.sequences.capacity import HostCapacity
from transfer.host_config import HostConfig

# Root mean squares in nats, as measured: the device from itself in bf16 with 12 layers, and what one query head's
# answer lost in one of ten layers comes to, in bf16 and in float32.
OWN_BFLOAT16, LOST_BFLOAT16, LOST_FLOAT32 = 0.03, 0.07, 0.06
CAPACITY = HostCapacity(16, PageLayout(4, 1, 1000), False, 1 << 30, 16, 64, 128, 512, lambda *_: 0)


def agreement(apart: float, allowed: float, single: float = 0.0) -> Agreement:
    return Agreement(2, 1000, 100, 0.9, apart, single, single, allowed)


def run_gate(
    monkeypatch: pytest.MonkeyPatch,
    rows: str,
    own: float,
    found: float,
    single: float = 0.0,
    kv: KvFormat = "bfloat16",
    references: list[str] | None = None,
) -> dict[str, Agreement]:
    """The gate where the device is `own` from itself, and `offloaded` is `found` from full attention."""
    measured: list[float] = []

    def measure(client: Any, answers: Any, allowed: float, full: str) -> Agreement:
        measured.append(allowed)
        if references is not None:
            references.append(full)
        return agreement(own, allowed) if len(measured) == 1 else agreement(found, allowed, single)

    reads = iter(range(0, 1000, 10))
    client: Any = SimpleNamespace(
        prompt=lambda num_tokens: np.zeros(num_tokens, np.int64).tolist(),
        longest_tokens={"exact": 4096, "offloaded": 4096},
        host_stats=lambda: SimpleNamespace(rows_read=next(reads), method_counts={}),
        forget_contexts=lambda: None,
    )
    monkeypatch.setattr(bench.long_gate, "_measure", measure)
    monkeypatch.setattr(bench.long_gate, "_decode", lambda *_: [])
    offloaded = resolve_profiles({}, HostConfig())["offloaded"]
    return check_host_path(client, CAPACITY, kv, rows, [offloaded], 2, Console(quiet=True))


@pytest.mark.parametrize(
    ("rows", "own", "found"),
    [("bfloat16", OWN_BFLOAT16, 0.03), ("bfloat16", 1e-6, 4e-4), ("int8", 1e-6, 1.5e-3), ("int4", 1e-6, 0.04)],
)
def test_what_is_measured_of_a_sound_path_passes(
    monkeypatch: pytest.MonkeyPatch, rows: str, own: float, found: float
) -> None:
    assert run_gate(monkeypatch, rows, own, found)["offloaded"].apart == found


@pytest.mark.parametrize(
    ("rows", "own", "found"),
    [
        ("bfloat16", OWN_BFLOAT16, LOST_BFLOAT16),
        ("bfloat16", 1e-6, LOST_FLOAT32 / 5),
        ("int8", 1e-6, LOST_FLOAT32 / 4),
        ("int4", 1e-6, 0.21),  # the lost answer of the shape `tiny`
        ("bfloat16", OWN_BFLOAT16, float("nan")),
    ],
)
def test_an_answer_lost_in_one_layer_is_beyond_the_bound(
    monkeypatch: pytest.MonkeyPatch, rows: str, own: float, found: float
) -> None:
    with pytest.raises(GateError, match="offloaded: log-probabilities are"):
        run_gate(monkeypatch, rows, own, found)


def test_one_token_a_nat_off_is_beyond_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    run_gate(monkeypatch, "bfloat16", OWN_BFLOAT16, 0.03, single=0.3)
    with pytest.raises(GateError, match="offloaded: a token is"):
        run_gate(monkeypatch, "bfloat16", OWN_BFLOAT16, 0.03, single=1.0)


def test_a_device_that_is_far_from_itself_is_nothing_to_compare_with(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GateError, match="exact: log-probabilities are"):
        run_gate(monkeypatch, "bfloat16", 0.3, 0.01)


@pytest.mark.parametrize(("kv", "reference"), [("bfloat16", "exact"), ("int8", "offloaded"), ("fp8", "offloaded")])
def test_answers_are_compared_with_a_prefill_that_attends_to_rows_as_they_are(
    monkeypatch: pytest.MonkeyPatch, kv: KvFormat, reference: str
) -> None:
    references: list[str] = []
    run_gate(monkeypatch, "bfloat16", OWN_BFLOAT16, 0.03, kv=kv, references=references)
    assert references == ["exact", reference]  # the device is compared with itself first
