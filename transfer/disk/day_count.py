"""Count the bytes that are written on a day, over restarts: the wear of a disk has a limit of its own."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path


class DayCount:
    """The bytes written on this day (UTC), kept in a small file. limit_bytes: None: any."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self._path, self._limit_bytes = path, limit_bytes
        self._day, self.num_bytes = _today(), 0
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError):
            kept = json.loads(path.read_text())
            if kept["day"] == self._day:
                self.num_bytes = max(0, int(kept["bytes"]))

    def allows(self, num_bytes: int) -> bool:
        """Tell whether so many more bytes may be written today."""
        if self._day != _today():
            self._day, self.num_bytes = _today(), 0
        return self._limit_bytes is None or self.num_bytes + num_bytes <= self._limit_bytes

    def add(self, num_bytes: int) -> None:
        """Add what was written. What cannot be kept is counted until the program ends."""
        self.num_bytes += num_bytes
        part = self._path.with_suffix(".part")
        with suppress(OSError):
            part.write_text(json.dumps({"day": self._day, "bytes": self.num_bytes}))
            os.replace(part, self._path)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
