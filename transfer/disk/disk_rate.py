"""Measure how fast a folder's disk is read: once at the start, then by what is read."""

import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

PROBE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20
_LEAST_BYTES = 64 * 2**20  # that are read before they count
_SMOOTHING = 0.3
SLOW_RATE = 100e6  # bytes a second, where it cannot be measured


def probe_rate(root: Path, num_threads: int) -> float:
    """Return the bytes a second at which a file that the system does not hold in memory is read; SLOW_RATE where that
    cannot be measured. Writes PROBE_BYTES and removes them.
    """
    path = root / "probe.part"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            piece = os.urandom(_PIECE_BYTES)
            for begin in range(0, PROBE_BYTES, _PIECE_BYTES):
                os.pwrite(descriptor, piece, begin)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            with ThreadPoolExecutor(num_threads) as threads:
                places = range(0, PROBE_BYTES, _PIECE_BYTES)
                list(threads.map(lambda begin: len(os.pread(descriptor, _PIECE_BYTES, begin)), places))
            return PROBE_BYTES / (time.perf_counter() - began)
        finally:
            os.close(descriptor)
    except OSError:
        return SLOW_RATE
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


class ReadRate:
    """The rate of reads that may run side by side. From any thread."""

    def __init__(self, bytes_a_second: float) -> None:
        self.bytes_a_second = bytes_a_second
        self._lock = Lock()
        self._num_reading = 0
        self._began = self._busy_seconds = 0.0
        self._num_bytes = 0

    def begin(self) -> None:
        with self._lock:
            if self._num_reading == 0:
                self._began = time.perf_counter()
            self._num_reading += 1

    def end(self, num_bytes: int) -> None:
        with self._lock:
            self._num_reading -= 1
            self._num_bytes += num_bytes
            if self._num_reading:
                return
            self._busy_seconds += time.perf_counter() - self._began
            if self._num_bytes >= _LEAST_BYTES and self._busy_seconds > 0:
                rate = self._num_bytes / self._busy_seconds
                self.bytes_a_second += _SMOOTHING * (rate - self.bytes_a_second)
                self._num_bytes, self._busy_seconds = 0, 0.0
