"""Add up and gather tensors over the processes of a model that is split over several devices.

Each process, a **rank**, has one device, and carries out the same plans. NCCL's kernels stand in CUDA graphs as all
others do; gloo is for devices that are CPUs.
"""

import gc
import logging
import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

log = logging.getLogger(__name__)

PATIENCE_S = 600.0  # the wait for a rank that compiles or reads its weights longer than the others
_AT_ONCE_S = 60.0  # the wait for ranks that do something at the same time
_LEAVE_S = 10.0  # the wait for graphs to be freed, and for NCCL to end
_HOST = "127.0.0.1"

_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # by torch 2.13's name, and by 2.11's


class RankError(RuntimeError):
    """The ranks cannot continue together."""


class Ranks(Protocol):
    """This rank among all. Every rank calls the same methods in the same order, with tensors of the same shapes."""

    rank: int
    count: int

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum over all ranks, in the place of `partial`, contiguous; of the same bits on each rank."""

    def join(self, columns: Tensor) -> Tensor:
        """Return `[rows, count * columns]`, new: the columns `[rows, columns]` of rank 0 first."""

    def most(self, number: float) -> float:
        """Return the largest of all ranks' numbers."""


class SmallSums(Protocol):
    """Adds up small tensors in place of NCCL. most_bytes: the largest tensor that it takes."""

    most_bytes: int

    def takes(self, partial: Tensor) -> bool:
        """Return whether it adds such a tensor up; alike on all ranks."""

    def add_up(self, partial: Tensor) -> Tensor:
        """Return the sum as `Ranks.add_up` does."""


class ProcessRanks:
    """Ranks that are processes of one host and meet at a TCP store on it. small: adds up small tensors in place of the
    library (`gpu.peer_sums`), or None.
    """

    def __init__(self, rank: int, count: int, device: torch.device, store: dist.Store) -> None:
        self.rank, self.count = rank, count
        self.small: SmallSums | None = None
        self._store = store
        self.device = torch.device("cuda", torch.cuda.current_device()) if device.type == "cuda" else device
        is_cuda = device.type == "cuda"
        for library in ("NCCL", "GLOO"):  # neither authenticates connections
            os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            "nccl" if is_cuda else "gloo", store=store, rank=rank, world_size=count,
            timeout=timedelta(seconds=PATIENCE_S), device_id=self.device if is_cuda else None,
        )  # fmt: skip
        self.most(0.0)  # opens the connections before anything is captured

    def add_up(self, partial: Tensor) -> Tensor:
        if self.small is not None and self.small.takes(partial):
            return self.small.add_up(partial)
        with self._together():
            dist.all_reduce(partial)
        return partial

    def join(self, columns: Tensor) -> Tensor:
        rows, width = columns.shape
        parts = columns.new_empty(self.count * rows, width)
        with self._together():
            _gather(parts, columns.contiguous())
        return parts.view(self.count, rows, width).transpose(0, 1).reshape(rows, self.count * width)

    def most(self, number: float) -> float:
        told = torch.tensor([number], dtype=torch.float64, device=self.device)
        with self._together():
            dist.all_reduce(told, dist.ReduceOp.MAX)
        return float(told)

    @contextmanager
    def waiting_less(self) -> Iterator[None]:
        """Wait for less time at the store: what ranks do there at once may fail on one of them."""
        self._store.set_timeout(timedelta(seconds=_AT_ONCE_S))
        try:
            yield
        finally:
            self._store.set_timeout(timedelta(seconds=PATIENCE_S))

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Raise RankError if the library reports that another rank is gone."""
        try:
            yield
        except RuntimeError as error:
            reason = " ".join(str(error).split())
            raise RankError(f"gpu.devices: rank {self.rank} of {self.count} lost another one ({reason})") from None

    def close(self, drop_graphs: Callable[[], None]) -> None:
        """Leave the group; other ranks may be gone already. drop_graphs: frees every captured graph, because NCCL waits
        for graphs that hold its kernels. If NCCL waits nevertheless, the group is abandoned. An ordinary exit of the
        interpreter would then wait for it, too.
        """
        if self.device.type == "cpu":
            dist.destroy_process_group()
            return
        leaving = threading.Thread(target=self._leave, args=(drop_graphs,), name="leave-ranks", daemon=True)
        leaving.start()
        leaving.join(_LEAVE_S)
        if leaving.is_alive():
            log.error("ranks event=not_left: NCCL still waits after %g s; the process has to end at once", _LEAVE_S)

    def _leave(self, drop_graphs: Callable[[], None]) -> None:
        torch.cuda.synchronize(self.device)
        drop_graphs()
        self.small = None
        gc.collect()
        dist.distributed_c10d._abort_process_group()


def open_store(rank: int, count: int, port: int) -> dist.TCPStore:
    """Return the store at which ranks meet, on this host; rank 0 opens it, on a free port if `port` is 0."""
    listening = socket.create_server((_HOST, port)) if rank == 0 else None  # torch's own listens to other hosts, too
    return dist.TCPStore(
        _HOST, port if listening is None else listening.getsockname()[1], count, is_master=rank == 0,
        timeout=timedelta(seconds=PATIENCE_S), wait_for_workers=False,
        master_listen_fd=None if listening is None else listening.detach(),
    )  # fmt: skip
