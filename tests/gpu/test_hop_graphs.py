"""A step over host contexts is launched whole and waits for its answers: in which order, and what becomes of failures.

On the CPU a thread stands in for the device that replays a graph.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from threading import Thread
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from gpu.decode.hop_segments import HopInputs
from gpu.decode.hop_steps import HopSteps, HopTimes
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import Twins, check_steps
from transfer.exchange import RELEASED, ExchangeError, ExchangeSlot
from transfer.tier import ContextLostError

PROMPTS = [document_prompt(length, length) for length in (300, 190, 411, 257, 130)]


class Recorded:
    """Stands in for a CUDA graph: a replay computes the recorded step again, in a thread that waits for answers."""

    recording: "Recorded | None" = None
    running: "Thread | None" = None

    def __init__(self) -> None:
        self.step = None

    def replay(self) -> None:
        Recorded.running = Thread(target=self.step)
        Recorded.running.start()


@contextmanager
def recorded(graph: Recorded, pool: object) -> Iterator[None]:
    Recorded.recording = graph
    yield
    Recorded.recording = None
    assert graph.step is not None


def compute_and_record(compute, steps: HopSteps, inputs: list[HopInputs]) -> list[torch.Tensor]:
    """`HopSteps._compute`, whose results stay where its first call put them."""
    results = compute(steps, inputs)

    @torch.inference_mode()
    def again() -> None:
        for kept, new in zip(results, compute(steps, inputs), strict=True):
            kept.copy_(new)

    if Recorded.recording is not None:
        Recorded.recording.step = again
    return results


def await_on_the_host(counters: torch.Tensor, slot: ExchangeSlot) -> None:
    deadline = time.monotonic() + 20
    while int(slot.answered) not in (int(counters[0]), RELEASED):
        assert time.monotonic() < deadline, "a recorded step waits for an answer that does not come"
        time.sleep(0)


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (
        ("graph", recorded), ("CUDAGraph", Recorded), ("Stream", MagicMock), ("stream", lambda _: nullcontext()),
        ("current_stream", MagicMock), ("graph_pool_handle", lambda: (0, 0)),
    ):  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    compute, answer = HopSteps._compute, HopSteps._answer_all
    monkeypatch.setattr(HopSteps, "_compute", lambda steps, inputs: compute_and_record(compute, steps, inputs))

    def answer_and_wait(*arguments):
        logits = answer(*arguments)
        Recorded.running.join()
        return logits

    monkeypatch.setattr(HopSteps, "_answer_all", answer_and_wait)
    monkeypatch.setattr("gpu.host.slot_exchange.await_answer", await_on_the_host)


def test_graphs_of_padded_sizes_are_replayed_and_wait_for_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.prefill(PROMPTS)
    fake_graphs(monkeypatch)
    told: list[float] = []
    with torch.inference_mode():
        twins.deposits._offload.capture((2, 5), told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    captured = twins.deposits._offload.decode_steps(False)._captured
    assert {size: [own.rows.rows for own in step.inputs] for size, step in captured.items()} == {
        5: [3, 2], 2: [1, 1], 1: [1],
    }  # fmt: skip
    for slots in ([0], [1, 0], [2, 3, 4], [0, 1, 2, 3, 4]):
        Recorded.running = None
        check_steps(twins, slots, 3)
        assert Recorded.running is not None


class RecordingHalf:
    """A half batch of one row that writes down what is computed, and a tier's attention that does so with answers."""

    def __init__(self, name: str, log: list[str], fails_at: int | None = None) -> None:
        self.name, self.log, self.fails_at = name, log, fails_at
        self.segments = SimpleNamespace(num_asks=2)
        self.exchange = SimpleNamespace(
            slot=SimpleNamespace(release=lambda: log.append(f"release {name}"), advance=lambda rows: None)
        )

    def expect(self, rows: int) -> None:
        pass

    def pack(self, slots, positions, size) -> None:
        pass

    def to_device(self, packed, size) -> None:
        pass

    def begin(self, inputs) -> None:
        self.log.append(f"begin {self.name}")

    def go_on(self, ask: int) -> torch.Tensor | None:
        self.log.append(f"go on {self.name}{ask}")
        return torch.zeros(1, 3) if ask == 1 else None

    def run(self, ask: int, slot) -> None:
        if ask == self.fails_at:
            raise ExchangeError("the device is behind")
        self.log.append(f"answer {self.name}{ask}")

    def give_up(self) -> None:
        self.log.append(f"give up {self.name}")


def recording_steps(halves: list[RecordingHalf]) -> HopSteps:
    of_row = iter(halves)
    return HopSteps(halves, SimpleNamespace(attention=lambda context_ids: next(of_row)), HopTimes())


def test_segments_are_captured_in_the_order_in_which_their_answers_come() -> None:
    log: list[str] = []
    steps = recording_steps([RecordingHalf("a", log), RecordingHalf("b", log)])
    steps.run([0, 1], [9, 9], [100, 101])
    assert log == [
        "begin a", "begin b", "answer a0", "go on a0", "answer b0", "go on b0", "answer a1", "go on a1", "answer b1",
        "go on b1",
    ]  # fmt: skip
    eager = [entry for entry in log if "answer" not in entry]
    log.clear()
    assert len(steps._compute([MagicMock(), MagicMock()])) == 2
    assert log == eager


def test_no_device_is_left_waiting_when_an_answer_fails() -> None:
    log: list[str] = []
    with pytest.raises(ExchangeError, match="behind"):
        recording_steps([RecordingHalf("a", log), RecordingHalf("b", log, fails_at=1)]).run([0, 1], [9, 9], [100, 101])
    assert log[-4:] == ["release a", "release b", "give up a", "give up b"]


def test_nothing_is_launched_when_a_context_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.prefill(PROMPTS[:2])
    fake_graphs(monkeypatch)
    with torch.inference_mode():
        twins.deposits._offload.capture((2,), lambda part: None)
    check_steps(twins, [0, 1], 1)
    Recorded.running = None
    steps = twins.deposits._offload.decode_steps(False)
    positions = [twins.sequences[slot].num_tokens for slot in (0, 1)]
    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "attention", MagicMock(side_effect=ContextLostError(101, "rows cannot come")))
        with torch.inference_mode(), pytest.raises(ContextLostError):
            steps.run([0, 1], positions, [100, 101])
    assert Recorded.running is None
    check_steps(twins, [0, 1], 3)
