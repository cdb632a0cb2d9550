"""Take pages of host memory from the operating system: mapped, touched, spread over NUMA nodes, pinned for the device.

Pages live as long as any view of them, so a stale view reads old bytes and never faults. Huge pages are requested,
because random rows in them are 4 to 20 % faster to read.
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
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context
_INTERLEAVE = 3  # MPOL_INTERLEAVE
_SET_MEMPOLICY = {"x86_64": 238, "aarch64": 237}
_LONG_BITS = 64
_MAP_NORESERVE = 0x4000  # Linux's numbers; Python names neither
_MADV_POPULATE_WRITE = 23
_MAPPING = re.compile(r"[0-9a-f]+-[0-9a-f]+ ")  # begins a mapping's lines in smaps

log = logging.getLogger(__name__)


def map_pages(num_bytes: int) -> Pages:
    """Return new pages, each written once so that its memory exists now. Raises OSError if the system refuses."""
    slack = HUGE_PAGE_BYTES if num_bytes >= HUGE_PAGE_BYTES else 0
    mapping = mmap.mmap(-1, num_bytes + slack, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    pages: Pages = np.frombuffer(mapping, np.uint8)
    advise_huge_pages(pages.ctypes.data, pages.nbytes)
    begin = -pages.ctypes.data % slack if slack else 0
    pages = pages[begin : begin + num_bytes]
    pages[::_TOUCH_BYTES] = 0
    return pages


def reserve_pages(num_bytes: int) -> Pages:
    """Reserve addresses that read as zeros and have no memory yet; `populate`, or a first write, allocates it.

    Raises OSError if even the addresses are refused.
    """
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    pages: Pages = np.frombuffer(mmap.mmap(-1, num_bytes, flags=flags), np.uint8)
    return pages


def populate(address: int, num_bytes: int) -> bool:
    """Allocate the memory of reserved addresses now, and return whether the system gave it.

    Linux before 5.14 cannot do this: memory then comes with the first write, and this returns True.
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
    """Return malloc's unused memory to the system. Once large pieces have been freed, malloc keeps such pieces, so
    those of a long prompt would stay resident. Takes milliseconds. Does nothing with a C library other than GNU's.
    """
    system = ctypes.CDLL(None)
    if hasattr(system, "malloc_trim"):
        system.malloc_trim(ctypes.c_size_t(0))


def give_back_programs() -> None:
    """Return the pages of this process's program and libraries to the system. Code that still runs is read again from
    the file cache; code of a compiler that is done is not. Does nothing if /proc lists no mappings.
    """
    listed, system, begin, end = Path("/proc/self/smaps"), ctypes.CDLL(None), 0, 0
    for line in listed.read_text().splitlines() if listed.exists() else []:
        words = line.split(maxsplit=5)
        if _MAPPING.match(line):
            is_program = words[1] == "r-xp" and words[-1].startswith("/")
            begin, end = (int(address, 16) for address in words[0].split("-")) if is_program else (0, 0)
        elif end and words[:2] == ["Anonymous:", "0"]:  # never written to: written pages would be lost
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
    """Pin pages until this array itself is freed; views of it do not count."""
    pin_pages(pages)
    weakref.finalize(pages, _unpin, pages.ctypes.data).atexit = False


def pinned_tensor(wanted: torch.Tensor) -> torch.Tensor:
    """Allocate a tensor of the meta device in pinned pages of its own. Raises OSError or MemoryError if refused."""
    pages = map_pages(wanted.nbytes)
    pin_for_life(pages)
    return torch.from_numpy(pages).view(wanted.dtype).view(wanted.shape)  # it holds `pages` itself, not a view


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
    """Return the NUMA nodes whose memory a process may use, from its /proc status file; empty if it lists none."""
    for line in status.read_text().splitlines() if status.exists() else []:
        name, _, listed = line.partition(":")
        if name == "Mems_allowed_list":
            ranges = [part.split("-") for part in listed.strip().split(",")]
            return [node for ends in ranges for node in range(int(ends[0]), int(ends[-1]) + 1)]
    return []


def interleave_thread() -> None:
    """Spread the pages that this thread touches first over the NUMA nodes. Does nothing on one node."""
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
