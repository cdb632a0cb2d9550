"""Take pages of host memory from the operating system: mapped, touched, spread over NUMA nodes, pinned for the device.

Pages live as long as any view of them, so a stale view reads old bytes and never faults. Huge pages are asked for: they
make random rows 4 to 20 % faster to read.
"""

import ctypes
import errno
import logging
import mmap
import os
import platform
import re
import resource
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import torch

from transfer.host_memory import HUGE_PAGE_BYTES

Pages = np.ndarray  # uint8 [num_bytes]

_TOUCH_BYTES = mmap.PAGESIZE
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_INTERLEAVE = 3  # MPOL_INTERLEAVE
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_LONG_BITS = 64
_MAP_NORESERVE = 0x4000  # Linux's numbers; Python names neither
_MADV_POPULATE_WRITE = 23
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # begins a mapping's lines in smaps

log = logging.getLogger(__name__)


def map_pages(num_bytes: int) -> Pages:
    """Return new pages, each written once, so that it exists before it is needed. Raises OSError where refused."""
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    mapping = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages: Pages = np.frombuffer(mapping, np.uint8)
    advise_huge_pages(pages.ctypes.data, pages.nbytes)
    begin = -pages.ctypes.data % slack if slack else 0
    pages = pages[begin : begin + num_bytes]
    pages[::_TOUCH_BYTES] = 0
    return pages


def reserve_pages(num_bytes: int) -> Pages:
    """Return addresses that read as zeros and have no memory yet: `populate` takes it, or a first write.

    Raises OSError where even addresses are refused.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages: Pages = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
    return pages


def populate(address: int, num_bytes: int) -> bool:
    """Take the memory of reserved addresses now, and return whether the system gave it.

    Before Linux 5.14, which cannot be asked, it comes with the first write, and this returns True.
    """
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    system = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_size_t(address + num_bytes - begin)
    if not system.madvise(ctypes.c_void_p(begin), size, _MADV_POPULATE_WRITE):
        return True
    return ctypes.get_errno() == errno.EINVAL


def advise_huge_pages(address: int, num_bytes: int) -> None:
    """Ask for huge pages in a range of this process's memory, before its first touch."""
    begin = -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    end = (address + num_bytes) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
    if begin >= end or not hasattr(mmap, "MADV_HUGEPAGE"):
        return
    system = ctypes.CDLL(None, use_errno=True)
    if system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_HUGEPAGE):
        code = ctypes.get_errno()
        if code != errno.EINVAL:  # a kernel without them: slower, not wrong
            raise OSError(code, os.strerror(code))


def give_back_heap() -> None:
    """Give the system what malloc holds and nobody uses: it keeps large pieces, too, once some have been freed, so a
    long prompt's stay resident. Takes milliseconds. A C library other than GNU's keeps what it has.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):
        system.malloc_trim(ctypes.c_size_t(0))


def give_back_programs() -> None:
    """Give the system the pages that this process has read of its program and libraries. What still runs comes back
    from the files' cache, and a compiler's that is done does not. Nothing happens where /proc lists no mappings.
    """
    listed, system, begin, end = Path("/proc/self/smaps"), ctypes.CDLL(None), 0, 0
    for line in listed.read_text().splitlines() if listed.exists() else []:
        words = line.split(maxsplit=5)
        if _MAPPING.match(line):
            is_program = words[1] == "r-xp" and words[-1].startswith("/")
            begin, end = (int(address, 16) for address in words[0].split("-")) if is_program else (0, 0)
        elif end and words[:2] == ["Anonymous:", "0"]:  # nobody has written to it: what was written would be lost
            system.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), mmap.MADV_DONTNEED)


def pin_pages(pages: Pages) -> None:
    """Register pages with CUDA, so that copies run at the link's speed. Raises OSError with CUDA's reason."""
    code = int(_cuda().cudaHostRegister(pages.ctypes.data, pages.nbytes, _PORTABLE))
    if code:
        raise OSError(code, f"cudaHostRegister failed with CUDA error {code}; locked memory is {describe_lock_limit()}")


def unpin_pages(pages: Pages) -> None:
    """Undo `pin_pages`. Raises OSError with CUDA's reason."""
    _unpin(pages.ctypes.data)


def pin_for_life(pages: Pages) -> None:
    """Pin pages until they are freed: this array itself, not what shares its memory."""
    pin_pages(pages)
    weakref.finalize(pages, _unpin, pages.ctypes.data).atexit = False


def pinned_tensor(wanted: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor of the meta device, pinned, of its own pages. Raises OSError or MemoryError where refused."""
    pages = map_pages(wanted.nbytes)
    pin_for_life(pages)
    return torch.from_numpy(pages).view(wanted.dtype).view(wanted.shape)  # which holds these pages, and no view of them


def _unpin(address: int) -> None:
    code = int(_cuda().cudaHostUnregister(address))
    if code:
        raise OSError(code, f"cudaHostUnregister failed with CUDA error {code}")


def _cuda() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call, unused-ignore]


def describe_lock_limit() -> str:
    """Return the limit of `ulimit -l` in words."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    return "unlimited (ulimit -l)" if limit == resource.RLIM_INFINITY else f"{limit // 1024:,} KiB (ulimit -l)"


def allowed_nodes(status: Path) -> list[int]:
    """Return the NUMA nodes whose memory a process may use, from its /proc status file; empty where the file does not
    list them.
    """
    for line in status.read_text().splitlines() if status.exists() else []:
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            ranges = [part.split("-") for part in listed.strip().split(",")]
            return [node for ends in ranges for node in range(int(ends[0]), int(ends[-1]) + 1)]
    return []


def interleave_thread() -> None:
    """Spread the pages that this thread touches first over the NUMA nodes; on one node nothing is done."""
    nodes = allowed_nodes(Path("/proc/self/status"))
    number = _SET_MEMPOLICY.get(platform.machine())
    if len(nodes) < 2 or number is None:
        return
    words = max(nodes) // _LONG_BITS + 1
    mask = (ctypes.c_uint64 * words)()
    for node in nodes:
        mask[node // _LONG_BITS] |= 1 << node % _LONG_BITS
    system = ctypes.CDLL(None, use_errno=True)
    if system.syscall(number, _INTERLEAVE, ctypes.byref(mask), ctypes.c_ulong(words * _LONG_BITS + 1)):
        log.warning("numa_interleave_refused nodes=%d error=%s", len(nodes), os.strerror(ctypes.get_errno()))
