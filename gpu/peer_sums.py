"""Add up small tensors over the GPUs of one host in one kernel, which reads every rank's part from its GPU's memory.

The kernel is torch's ("one shot", of `torch.distributed._symmetric_memory`). Every rank adds the parts in the order of
ranks, so all have the same bits; in bfloat16 each addition rounds. It is faster than NCCL for little data, and slower
for much: both are timed at the start, in captured graphs.
"""

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from gpu.batching.capture import graph_seconds
from gpu.ranks import ProcessRanks, Ranks, SmallSums

log = logging.getLogger(__name__)

_SIZES = tuple(4096 << power for power in range(9))  # bytes, of sums that are timed
_DTYPES = (torch.bfloat16, torch.float32)  # that the kernel has
_ALIGNMENT = 16  # bytes, of what a thread loads and stores
_SUMS = 32  # of a captured graph

Time = tuple[int, float, float]
Seconds = Callable[[Callable[[Tensor], Tensor], int, torch.device], float]  # of one sum of so many bytes


class PeerSums:
    """Memory of this rank's GPU that all ranks read, and sums over it. num_opened: how many this process has opened. It
    is at most one: torch counts rendezvous, and ranks with different counts do not meet.
    """

    num_opened = 0

    def __init__(self, device: torch.device) -> None:
        """Open it, on all ranks at the same time. Raises RuntimeError if they cannot read each other's memory."""
        # No multicast: nothing here uses it. Each rank but the first sees one device alone, which all call number 0.
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        assert dist.group.WORLD is not None, "ranks are in a group"
        self.most_bytes = _SIZES[-1]
        self._group = dist.group.WORLD.group_name
        PeerSums.num_opened += 1
        if symmetric_memory.get_backend(device) != "CUDA":  # where it is the default it cannot be asked for
            symmetric_memory.set_backend("CUDA")
        self._room = symmetric_memory.empty(self.most_bytes, dtype=torch.uint8, device=device)
        symmetric_memory.rendezvous(self._room, self._group)

    def takes(self, partial: Tensor) -> bool:
        return fits(partial, self.most_bytes)

    def add_up(self, partial: Tensor) -> Tensor:
        # Behind the kernel no rank reads any more, so the next sum may take the same place. It could copy, too, but
        # tells other ranks of its part before all its threads have written theirs.
        flat = partial.view(-1)
        part = self._room[: partial.nbytes].view(partial.dtype)
        part.copy_(flat)
        torch.ops.symm_mem.one_shot_all_reduce_out(part, "sum", self._group, flat)
        return partial


def fits(partial: Tensor, most_bytes: int) -> bool:
    """Return whether the kernel adds such a tensor up; the same on all ranks, whose tensors have the same layout."""
    return (
        0 < partial.nbytes <= most_bytes
        and partial.nbytes % _ALIGNMENT == 0
        and partial.storage_offset() * partial.itemsize % _ALIGNMENT == 0
        and partial.dtype in _DTYPES
        and partial.is_contiguous()
    )


def use_peer_sums(ranks: ProcessRanks) -> None:
    """Use peers' memory for small sums if that is possible and faster. All ranks call this at the same time."""
    why_not = _why_not(ranks.count) if ranks.rank == 0 else None
    with ranks.waiting_less():
        ranks.small = choose(ranks, why_not, lambda: PeerSums(ranks.device), ranks.device)


def _why_not(count: int) -> str | None:
    """Return the reason why ranks cannot read each other's memory, or None. Only rank 0 can tell: it sees all
    devices.
    """
    if PeerSums.num_opened:
        return "another engine of this process has had such memory"
    for one, other in permutations(range(count), 2):
        if not torch.cuda.can_device_access_peer(one, other):
            return f"device {one} cannot access device {other}"
    return None


def choose(
    ranks: Ranks, why_not: str | None, make: Callable[[], SmallSums], device: torch.device,
    seconds: Seconds | None = None,
) -> SmallSums | None:  # fmt: skip
    """Return the sums to use for small tensors in place of `ranks.add_up`, with the size up to which they are faster on
    all ranks. None: use none; the log has the reason. All ranks return the same. why_not: what rules it out on this
    rank.
    """
    if not _agree(ranks, why_not):
        return None
    sums: SmallSums | None = None
    try:
        sums = make()
    except RuntimeError as error:
        why_not = " ".join(str(error).split())
    if not _agree(ranks, why_not):
        return None
    assert sums is not None, "all ranks have opened it"
    if not _agree(ranks, what_is_wrong(ranks, sums, device)):
        return None
    times = list(_times(ranks, sums, device, seconds or _sum_seconds))
    sums.most_bytes = quicker_up_to(times)
    if ranks.rank == 0:
        told = " ".join(f"{size}:{1e6 * by_nccl:.1f}/{1e6 * own:.1f}" for size, by_nccl, own in times)
        log.info("ranks event=sums peers_up_to_bytes=%d us_of_nccl_and_peers='%s'", sums.most_bytes, told)
    return sums if sums.most_bytes else None


def _agree(ranks: Ranks, why_not: str | None) -> bool:
    """Return whether no rank has a reason against it."""
    if why_not is not None:
        log.warning("ranks event=sums_by_nccl rank=%d reason=%r", ranks.rank, why_not)
    return not ranks.most(float(why_not is not None))


def quicker_up_to(times: Sequence[Time]) -> int:
    """Return the size in bytes up to which a sum through peers' memory was faster at every timed size; 0: at none.
    times: bytes, seconds of NCCL, seconds of peers' memory, in the order of bytes.
    """
    most = 0
    for size, by_nccl, own in times:
        if own >= by_nccl:
            break
        most = size
    return most


def _times(ranks: Ranks, sums: SmallSums, device: torch.device, seconds: Seconds) -> Iterator[Time]:
    for size in _SIZES:
        yield size, ranks.most(seconds(ranks.add_up, size, device)), ranks.most(seconds(sums.add_up, size, device))


def _sum_seconds(add_up: Callable[[Tensor], Tensor], num_bytes: int, device: torch.device) -> float:
    """Return the seconds that a sum of so many bytes takes between others, in a captured graph."""
    partial = torch.zeros(num_bytes // 2, dtype=torch.bfloat16, device=device)
    return graph_seconds(lambda: [add_up(partial) for _ in range(_SUMS)]) / _SUMS


def what_is_wrong(ranks: Ranks, sums: SmallSums, device: torch.device) -> str | None:
    """Return how sums of random numbers differ from NCCL's, or among ranks; None: they do not."""
    generator, wrong = torch.Generator().manual_seed(ranks.rank), []
    for dtype in _DTYPES:  # all of it on every rank, whatever one finds
        own = torch.randn(1, sums.most_bytes // dtype.itemsize, generator=generator).to(dtype).to(device)
        got = sums.add_up(own.clone())
        wanted, magnitude = ranks.add_up(own.double()), ranks.add_up(own.double().abs())
        if not bool(((got - wanted).abs() <= ranks.count * torch.finfo(dtype).eps * magnitude).all()):
            wrong.append(f"sums of {dtype} through peers' memory are wrong")
        everywhere = ranks.join(got.view(torch.int32)).view(ranks.count, -1)
        if not torch.equal(everywhere, everywhere[:1].expand_as(everywhere)):
            wrong.append(f"sums of {dtype} through peers' memory differ among ranks")
    return ", ".join(wrong) or None
