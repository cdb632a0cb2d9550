"""Estimate how fast a folder's disk is read: from a measurement that is kept in the folder, then from actual reads."""

import json
import math
import os
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock

PROBE_BYTES = 64 * 2**20
_PIECE_BYTES = 2**20
_LEAST_BYTES = 64 * 2**20  # bytes that are read before the estimate is updated
_SMOOTHING = 0.3
SLOW_RATE = 100e6  # bytes a second, if the rate cannot be measured
KEPT_SECONDS = 30 * 24 * 3600.0  # how long a measurement is valid
_FILE = "rate.json"


def find_rate(root: Path, num_threads: int) -> float:
    """Return the rate that `probe_rate` measures, or has measured within KEPT_SECONDS for the same device and number of
    threads. The folder keeps it with its date, so that not every start writes PROBE_BYTES.
    """
    wanted = {"device": _device_of(root), "threads": num_threads}
    with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        kept = json.loads((root / _FILE).read_text())
        rate, age = float(kept["bytes_a_second"]), time.time() - float(kept["measured_s"])
        if {key: kept[key] for key in wanted} == wanted and 0 <= age < KEPT_SECONDS and 0 < rate < math.inf:
            return rate
    rate = probe_rate(root, num_threads)
    if rate != SLOW_RATE:
        part = root / f"{_FILE}.part"
        with suppress(OSError):
            part.write_text(json.dumps({"bytes_a_second": rate, "measured_s": time.time(), **wanted}))
            os.replace(part, root / _FILE)
    return rate


def _device_of(root: Path) -> list[int]:
    """Return numbers that identify the device and the file system of a folder; empty if it cannot be read."""
    try:
        return [root.stat().st_dev, os.statvfs(root).f_fsid]
    except OSError:
        return []


def probe_rate(root: Path, num_threads: int) -> float:
    """Measure the bytes a second at which a file is read that is not in the system's cache. Return SLOW_RATE if that
    fails. Writes PROBE_BYTES and removes them.
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
    """The rate of reads, which may run side by side. Called from any thread."""

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
