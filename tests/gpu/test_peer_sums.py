"""What adds up small tensors: chosen alike by all ranks, by times, and only where its sums are right everywhere."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from gpu import peer_sums
from gpu.peer_sums import choose, fits, quicker_up_to
from gpu.ranks import ProcessRanks, SmallSums
from tests.gpu.thread_ranks import ThreadRanks, run_ranks

CPU = torch.device("cpu")
LARGEST = 1 << 20


class FakeSums:
    """Sums as the kernel's, by threads, and what is wrong with them."""

    def __init__(self, ranks: ThreadRanks, spoil: Callable[[int, Tensor], object] = lambda rank, total: None) -> None:
        self.most_bytes = LARGEST
        self._ranks, self._spoil = ranks, spoil

    def takes(self, partial: Tensor) -> bool:
        return fits(partial, self.most_bytes)

    def add_up(self, partial: Tensor) -> Tensor:
        self._ranks.add_up(partial)
        self._spoil(self._ranks.rank, partial)
        return partial


def chosen(
    make: Callable[[ThreadRanks], SmallSums], peers_s: Callable[[int, int], float], why_not: str | None = None
) -> list[int | None]:
    """Return the most bytes that each of two ranks adds up through peers' memory. peers_s: seconds that a rank measures
    for so many bytes, where NCCL takes ten; why_not: of rank 0.
    """

    def run(ranks: ThreadRanks) -> int | None:
        def seconds(add_up: Callable[[Tensor], Tensor], num_bytes: int, device: torch.device) -> float:
            return 10.0 if add_up == ranks.add_up else peers_s(ranks.rank, num_bytes)

        sums = choose(ranks, why_not if ranks.rank == 0 else None, lambda: make(ranks), CPU, seconds)
        return None if sums is None else sums.most_bytes

    return run_ranks(2, run)


@pytest.mark.parametrize(
    ("own", "most"),
    [([1, 1, 1], 4), ([1, 1, 3], 2), ([3, 1, 1], 0), ([1, 3, 1], 1), ([2, 1, 1], 0)],
    ids=["always", "small ones", "never", "not behind a slower one", "not if as quick"],
)
def test_the_bound_is_where_every_smaller_sum_is_quicker(own: list[float], most: int) -> None:
    assert quicker_up_to([(1 << power, 2.0, one) for power, one in enumerate(own)]) == most


def test_ranks_choose_alike_though_they_measure_otherwise() -> None:
    """The slower one decides: rank 1 finds NCCL quicker from 64 KiB on, and rank 0 from 256 KiB."""
    ends = (1 << 18, 1 << 16)
    assert chosen(FakeSums, lambda rank, size: 5.0 if size < ends[rank] else 20.0) == [1 << 15, 1 << 15]


def test_nccl_serves_where_it_is_quicker() -> None:
    assert chosen(FakeSums, lambda rank, size: 11.0) == [None, None]


def test_nccl_serves_without_access_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def never(ranks: ThreadRanks) -> SmallSums:
        raise AssertionError("opened on one rank while the other stays away")

    assert chosen(never, lambda rank, size: 1.0, "device 0 cannot access device 1") == [None, None]
    assert "event=sums_by_nccl rank=0 reason='device 0 cannot access device 1'" in caplog.text


def test_nccl_serves_all_where_one_rank_fails(caplog: pytest.LogCaptureFixture) -> None:
    def fail_on_one(ranks: ThreadRanks) -> SmallSums:
        if ranks.rank == 1:
            raise RuntimeError("no\nhandle")
        return FakeSums(ranks)

    assert chosen(fail_on_one, lambda rank, size: 1.0) == [None, None]
    assert "rank=1 reason='no handle'" in caplog.text


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda rank, total: total[..., -1].add_(1.0 if rank == 1 else 0.0), "are wrong"),
        (lambda rank, total: total[..., :1].mul_(1.0 + rank * 2**-8), "differ among ranks"),
        (lambda rank, total: total[..., 5].fill_(torch.nan), "are wrong"),
    ],
    ids=["wrong on one", "other bits on one", "not a number"],
)
def test_wrong_sums_are_not_used(
    spoil: Callable[[int, Tensor], object], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    assert chosen(lambda ranks: FakeSums(ranks, spoil), lambda rank, size: 1.0) == [None, None]
    assert said in caplog.text


def test_the_bound_and_times_are_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gpu")
    assert chosen(FakeSums, lambda rank, size: 5.0) == [LARGEST, LARGEST]
    assert caplog.text.count("event=sums peers_up_to_bytes=1048576 us_of_nccl_and_peers='4096:10000000.0/50") == 1


def test_what_fits() -> None:
    whole = torch.zeros(4, 64, dtype=torch.bfloat16)
    assert fits(whole, 512)
    assert fits(whole[1:], 512)
    assert fits(whole.float(), 1024)
    assert not fits(whole, 511)
    assert not fits(whole[:0], 512)
    assert not fits(whole.half(), 512)
    assert not fits(whole.t(), 512)
    assert not fits(whole.view(-1)[1:17], 512), "its first byte is aligned to two"
    assert not fits(whole.view(-1)[:4], 512), "of eight bytes"


def test_only_what_fits_goes_through_peers_memory() -> None:
    """What does not is the library's, which is not there in this test."""
    ranks = ProcessRanks.__new__(ProcessRanks)
    ranks.rank, ranks.count = 0, 2
    taken: list[Tensor] = []

    class Taking(FakeSums):
        def __init__(self) -> None:
            self.most_bytes = 64

        def add_up(self, partial: Tensor) -> Tensor:
            taken.append(partial)
            return partial

    ranks.small = Taking()
    small, large = torch.zeros(16), torch.zeros(32)
    assert ranks.add_up(small) is small
    with pytest.raises(ValueError, match="process group"):
        ranks.add_up(large)
    assert len(taken) == 1


def test_memory_is_shared_once_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts rendezvous of a process, so a second engine's rank 0 would never meet its new ranks."""
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: {one, other} != {1, 2})
    assert peer_sums._why_not(2) is None
    assert peer_sums._why_not(3) == "device 1 cannot access device 2"
    monkeypatch.setattr(peer_sums.PeerSums, "num_opened", 1)
    assert peer_sums._why_not(2) == "another engine of this process has had such memory"
