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

from gpu.attention.step_rows import StepRows
from gpu.batching.captured_steps import StepKind
from gpu.batching.halving import Halving
from gpu.decode.steps import Batch, DecodeSteps, HostReader, HostReadTimes, LaunchedStep
from gpu.step import HostRead
from tests.gpu.reference_model import document_prompt
from tests.gpu.twin_runners import Twins, check_steps
from tests.reference_tier import LOOK_S, ReferenceTier
from transfer.exchange import RELEASED, ExchangeError, Handshake
from transfer.host_tier import ContextLostError, ContextRead

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
def recorded(graph: Recorded, pool: object, stream: object) -> Iterator[None]:
    Recorded.recording = graph
    yield
    Recorded.recording = None
    assert graph.step is not None


def compute_and_record(compute, *arguments) -> list[torch.Tensor]:
    """`DecodeSteps.compute`, whose results stay where its first call put them."""
    results = compute(*arguments)

    @torch.inference_mode()
    def again() -> None:
        torch.set_num_threads(1)  # of this thread's: others that wait would spin beside it
        for kept, new in zip(results, compute(*arguments), strict=True):
            kept.copy_(new)

    if Recorded.recording is not None:
        Recorded.recording.step = again
    return results


def await_on_the_host(counters: torch.Tensor, slot: Handshake) -> None:
    deadline = time.monotonic() + 20
    while int(slot.answered) not in (int(counters[0]), RELEASED):
        assert time.monotonic() < deadline, "a recorded step waits for an answer that does not come"
        time.sleep(LOOK_S)


def fake_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, fake in (
        ("graph", recorded), ("CUDAGraph", Recorded), ("Stream", MagicMock), ("stream", lambda _: nullcontext()),
        ("current_stream", MagicMock), ("graph_pool_handle", lambda: (0, 0)),
    ):  # fmt: skip
        monkeypatch.setattr(f"torch.cuda.{name}", fake)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    compute, run = DecodeSteps.compute, DecodeSteps.run
    monkeypatch.setattr(DecodeSteps, "compute", lambda *arguments: compute_and_record(compute, *arguments))

    def run_and_wait(*arguments) -> LaunchedStep:
        """What is launched behind a step reads its logits, as on one stream."""
        launched = run(*arguments)
        if Recorded.running is not None:
            Recorded.running.join()
        return launched

    answer = ReferenceTier.answer
    monkeypatch.setattr(ReferenceTier, "answer", lambda *arguments: (torch.set_num_threads(1), answer(*arguments))[1])
    monkeypatch.setattr(DecodeSteps, "run", run_and_wait)
    for name in ("slots", "experts"):
        monkeypatch.setattr(f"gpu.exchange.device_{name}.await_answer", await_on_the_host)


def test_graphs_of_padded_sizes_are_replayed_and_wait_for_their_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.prefill(PROMPTS)
    fake_graphs(monkeypatch)
    told: list[float] = []
    steps = twins.offloading.decode_steps
    with monkeypatch.context() as patch, torch.inference_mode():
        patch.setattr(steps.host_reader.halving, "always", None)  # as where half batches may pay
        steps.capture((2, 5), told.append)
    assert told == sorted(told)
    assert told[-1] == 1.0
    captured = {(kind.num_parts, size): step for (kind, size), step in steps._captured.items()}
    assert {key: [rows.num_rows for rows in step.rows] for key, step in captured.items()} == {
        (0, 5): [5], (0, 2): [2], (1, 5): [5], (1, 2): [2], (1, 1): [1], (2, 5): [3, 2], (2, 2): [1, 1],
    }  # fmt: skip
    for slots in ([0], [1, 0], [2, 3, 4], [0, 1, 2, 3, 4]):
        Recorded.running = None
        check_steps(twins, slots, 3)
        assert Recorded.running is not None


class Log(list[str]):
    """Steps of two half batches of a row each, a and b, that ask twice; who computes and answers writes it down.

    fails_at: the host request of b's that no device makes.
    """

    def __init__(self, fails_at: int | None = None) -> None:
        super().__init__()
        self.fails_at = fails_at
        self.steps = DecodeSteps(
            SimpleNamespace(
                step=self.step, offloaded_layers=(0, 1), last_tokens=torch.zeros(7), max_rows=2, checks_coverage=True,
                reusing=[], decoder=SimpleNamespace(delta=None, adapters=None), link=None,
            ),
            HostReader(SimpleNamespace(attention=self.attention), [self.exchange("a"), self.exchange("b")],
                   Halving(SimpleNamespace(), always=2), HostReadTimes()),
        )  # fmt: skip

    def exchange(self, name: str) -> SimpleNamespace:
        release, advance = lambda: self.append(f"release {name}"), lambda rows: None
        slot = SimpleNamespace(release=release, advance=advance, rows=1, is_released=False)
        return SimpleNamespace(name=name, slot=slot)

    def step(
        self, rows: StepRows, exchange: SimpleNamespace, reuses: bool, experts: None, lends: bool = False,
        adapts: bool = True,
    ) -> Iterator[None]:  # fmt: skip
        self.append(f"begin {exchange.name}")
        for ask in range(2):
            yield
            self.append(f"go on {exchange.name}{ask}")
        return torch.zeros(1, 3)

    def attention(self, asks: list[ContextRead]) -> SimpleNamespace:
        name = "ab"[asks[0].context_id - 100]

        def run(ask: int, slot: SimpleNamespace) -> None:
            if name == "b" and ask == self.fails_at:
                raise ExchangeError("the device is behind")
            self.append(f"answer {name}{ask}")

        return SimpleNamespace(run=run, give_up=lambda: self.append(f"give up {name}"))


TWO_ROWS = Batch([0, 1], [9, 9], [HostRead(100, 2, 4), HostRead(101, 2, 4)])


def test_layers_are_captured_in_the_order_in_which_their_answers_come() -> None:
    log = Log()
    log.steps.run(TWO_ROWS)
    assert log == [
        "begin a", "begin b", "answer a0", "go on a0", "answer b0", "go on b0", "answer a1", "go on a1", "answer b1",
        "go on b1",
    ]  # fmt: skip
    eager = [entry for entry in log if "answer" not in entry]
    log.clear()
    assert len(log.steps.compute([None, None], log.steps.host_reader.exchanges, StepKind(2, False))) == 2
    assert log == eager


def test_no_device_is_left_waiting_when_an_answer_fails() -> None:
    log = Log(fails_at=1)
    with pytest.raises(ExchangeError, match="behind"):
        log.steps.run(TWO_ROWS)
    assert log[-4:] == ["release a", "release b", "give up a", "give up b"]


def test_nothing_is_launched_when_a_context_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    twins = Twins()
    twins.prefill(PROMPTS[:2])
    fake_graphs(monkeypatch)
    with torch.inference_mode():
        twins.offloading.decode_steps.capture((2,), lambda part: None)
    check_steps(twins, [0, 1], 1)
    Recorded.running = None
    group = twins.group([0, 1])
    with monkeypatch.context() as patch:
        patch.setattr(twins.tier, "attention", MagicMock(side_effect=ContextLostError(101, "rows cannot come")))
        with torch.inference_mode(), pytest.raises(ContextLostError):
            twins.offloading.decode_steps.run(Batch(group.slots, group.positions, group.host_reads))
    assert Recorded.running is None
    check_steps(twins, [0, 1], 3)
