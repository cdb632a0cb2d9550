"""Ranks that are threads of one process, so that a split model is tested without processes of its own."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")
_PATIENCE_S = 120.0


class ThreadRanks:
    """One rank; see `gpu.ranks.Ranks`."""

    def __init__(self, rank: int, slots: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.count = rank, len(slots)
        self.num_sums = 0
        self._slots, self._barrier = slots, barrier

    def add_up(self, partial: Tensor) -> Tensor:
        self.num_sums += 1
        return partial.copy_(sum(self._exchange(partial.clone())))

    def join(self, columns: Tensor) -> Tensor:
        return torch.cat(self._exchange(columns.clone()), 1)

    def most(self, number: float) -> float:
        return max(self._exchange(number))

    def _exchange(self, own: Any) -> list[Any]:
        self._slots[self.rank] = own
        self._barrier.wait(_PATIENCE_S)
        told = list(self._slots)
        self._barrier.wait(_PATIENCE_S)
        return told


def run_ranks(count: int, work: Callable[[ThreadRanks], Result]) -> list[Result]:
    """Return what each rank's work does; if one fails, all do, and its error is raised."""
    slots, barrier = [None] * count, threading.Barrier(count)
    errors: list[BaseException] = []

    def run(rank: int) -> Result:
        try:
            return work(ThreadRanks(rank, slots, barrier))
        except BaseException as error:
            errors.append(error)
            barrier.abort()
            raise

    with ThreadPoolExecutor(count) as threads:
        futures = [threads.submit(run, rank) for rank in range(count)]
    if errors:
        raise errors[0]
    return [future.result() for future in futures]
