"""Ranks of one host: where they listen, and how they leave their group."""

import subprocess
import sys
import threading

import pytest
import torch

from gpu import ranks
from gpu.ranks import ProcessRanks, open_store

RANK = """
import sys, psutil, torch
from gpu.ranks import ProcessRanks, open_store
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = open_store(rank, 2, port)
print(store.port, flush=True)
for _ in range(2):  # one engine after another
    ranks = ProcessRanks(rank, 2, torch.device("cpu"), store)
    assert ranks.most(rank) == 1.0
    own = [one for one in psutil.Process().net_connections() if one.status == "LISTEN"]
    print(*{one.laddr.ip for one in own}, flush=True)
    assert torch.distributed.is_initialized()
    ranks.close(lambda: None)
    assert not torch.distributed.is_initialized()
    store = torch.distributed.PrefixStore("again", store)
"""


def test_ranks_listen_to_their_own_host_alone_and_may_meet_again() -> None:
    """Whoever connects is not asked who it is."""
    first = subprocess.Popen([sys.executable, "-c", RANK, "0", "0"], stdout=subprocess.PIPE, text=True)
    assert first.stdout is not None
    port = first.stdout.readline().strip()
    second = subprocess.run([sys.executable, "-c", RANK, "1", port], capture_output=True, text=True, timeout=60)
    assert second.returncode == 0, second.stderr
    said, _ = first.communicate(timeout=60)
    assert first.returncode == 0
    assert set(said.split()) == {"127.0.0.1"}
    assert set(second.stdout.split()) <= {"127.0.0.1", port}


@pytest.mark.parametrize("hangs", [False, True])
def test_a_group_of_nccl_is_left_once_no_graph_holds_its_kernels(hangs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it cannot be left, whoever asks does not wait for ever."""
    done: list[str] = []
    ended = threading.Event()
    leaving = ProcessRanks.__new__(ProcessRanks)
    leaving.device = torch.device("cuda", 0)

    def abort() -> None:
        done.append("left")
        if hangs:
            ended.wait(60.0)

    monkeypatch.setattr(ranks, "_LEAVE_S", 0.1 if hangs else 60.0)
    monkeypatch.setattr(ranks.torch.cuda, "synchronize", lambda device: done.append("waited"))
    monkeypatch.setattr(ranks.dist.distributed_c10d, "_abort_process_group", abort)
    leaving.close(lambda: done.append("dropped"))
    ended.set()
    assert done == ["waited", "dropped", "left"]


def test_this_process_is_in_no_group() -> None:
    assert not torch.distributed.is_initialized()
    assert open_store(0, 1, 0).port > 0
