"""Processes of other devices: one that ends is named, all end with rank 0, and none outlives it."""

import os
import queue
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import ModelError, load_architecture
from gpu.ranks import RankError
from scheduler.engine import rank_processes
from scheduler.engine.rank_processes import RankProcesses, visible_devices
from scheduler.engine_config import EngineConfig, EngineStart
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import probe_machine

OPEN = "import sys; from multiprocessing.connection import Connection; c = Connection(int(sys.argv[1]));"
WAITING = OPEN + "c.recv_bytes(); c.recv_bytes()"
COMPLAINING = OPEN + "c.recv_bytes(); c.send('memory ran out'); sys.exit(1)"
WAIT_S = 20.0


def start(devices: int = 2) -> EngineStart:
    config = EngineConfig(model=ModelConfig(random_weights="tiny"), gpu=GpuConfig(device="cpu", devices=2))
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    config = config.model_copy(update={"gpu": config.gpu.model_copy(update={"devices": devices})})
    return EngineStart(config=config, memory=plan, log_level="error")


@contextmanager
def running(
    script: str, monkeypatch: pytest.MonkeyPatch, devices: int = 2
) -> Iterator[tuple[RankProcesses, "queue.Queue[str]"]]:
    """Processes that run a script in place of a rank, and what is told of their ends."""
    monkeypatch.setattr(rank_processes, "_COMMAND", (sys.executable, "-c", script))
    told: queue.Queue[str] = queue.Queue()
    processes = RankProcesses(start(devices), told.put)
    try:
        yield processes, told
    finally:
        processes.close()


def test_a_rank_that_is_killed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(WAITING, monkeypatch) as (processes, told):
        os.kill(processes._processes[0].pid, signal.SIGKILL)
        assert told.get(timeout=WAIT_S) == "gpu.devices: rank 1 of 2: its process was killed by signal 9"
        with pytest.raises(RankError, match=r"^gpu.devices: rank 1 of 2 cannot be reached"):
            processes.tell("a plan")


def test_what_a_rank_says_before_it_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(COMPLAINING, monkeypatch) as (_, told):
        assert told.get(timeout=WAIT_S) == "gpu.devices: rank 1 of 2: memory ran out"


def test_a_reason_names_its_rank_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(COMPLAINING.replace("memory", "gpu.devices: rank 1 of 2: memory"), monkeypatch) as (_, told):
        assert told.get(timeout=WAIT_S) == "gpu.devices: rank 1 of 2: memory ran out"


def test_the_first_rank_that_ends_is_told_once_the_others_have_given_their_memory_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next engine may need it at once."""
    with running(WAITING, monkeypatch, devices=4) as (processes, told):
        processes._processes[1].kill()
        assert told.get(timeout=WAIT_S) == "gpu.devices: rank 2 of 4: its process was killed by signal 9"
        assert [one.returncode for one in processes._processes] == [-signal.SIGKILL] * 3
    assert told.empty()


def test_killed_ranks_are_gone_and_nobody_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(WAITING, monkeypatch) as (processes, told):
        os.kill(processes._processes[0].pid, signal.SIGSTOP)
        processes.kill()
        assert processes._processes[0].returncode == -signal.SIGKILL
    assert told.empty()


def test_ranks_that_are_told_to_end_do_and_nobody_hears_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(WAITING, monkeypatch) as (processes, told):
        processes.close()
        assert processes._processes[0].returncode == 0
        assert told.empty()


def test_a_rank_that_hangs_is_killed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes, "_END_S", 0.1)
    with running(WAITING, monkeypatch) as (processes, told):
        os.kill(processes._processes[0].pid, signal.SIGSTOP)
        processes.close()
        assert processes._processes[0].returncode == -signal.SIGKILL
        assert told.empty()


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL])
def test_a_rank_that_hangs_does_not_outlive_rank_0(end: signal.Signals) -> None:
    rank = (
        "import os, signal; from scheduler.engine.parent_watch import be_killed_with_parent; be_killed_with_parent();"
        "print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGSTOP)"
    )
    first = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {rank!r}])"
    parent = subprocess.Popen([sys.executable, "-c", first], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    hung = psutil.Process(int(parent.stdout.readline()))
    parent.send_signal(end)
    parent.wait(WAIT_S)
    hung.wait(WAIT_S)


def _count(count: int) -> Callable[[], int]:
    return lambda: count


def test_each_rank_sees_the_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_processes.torch.cuda, "device_count", _count(4))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_devices(2) == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5,GPU-12,7")
    assert visible_devices(3) == ["3", "5", "GPU-12"]
    with pytest.raises(ModelError, match=r"^gpu.devices: asked 5, torch finds 4 CUDA devices; lower it$"):
        visible_devices(5)
