"""Count the bytes written on a day, across restarts, for a limit on the wear of a disk."""

import json
import os
import time
from contextlib import suppress
from pathlib import Path

DAYS_KEPT = 4  # if the clock is set back and forth, the counts of these days go on


class DayCount:
    """The bytes written on each of the last days (UTC), kept in a small file. limit_bytes: of a day; None: any."""

    def __init__(self, path: Path, limit_bytes: int | None) -> None:
        self._path, self.limit_bytes = path, limit_bytes
        self._days: dict[str, int] = {}  # the day of the last write is last
        with suppress(OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
            kept = json.loads(path.read_text())["days"]
            self._days = {str(day): max(0, int(num_bytes)) for day, num_bytes in kept.items()}

    @property
    def num_bytes(self) -> int:
        """Return the bytes written today."""
        return self._days.get(_today(), 0)

    def allows(self, num_bytes: int) -> bool:
        """Return whether `num_bytes` more may be written today."""
        return self.limit_bytes is None or self.num_bytes + num_bytes <= self.limit_bytes

    def add(self, num_bytes: int) -> None:
        """Add written bytes. If the file cannot be written, they count until the program ends."""
        today = _today()
        self._days[today] = self._days.pop(today, 0) + num_bytes
        self._days = dict(list(self._days.items())[-DAYS_KEPT:])
        part = self._path.with_suffix(".part")
        with suppress(OSError):
            part.write_text(json.dumps({"days": self._days}))
            os.replace(part, self._path)


def _today() -> str:
    return time.strftime("%Y-%m-%d", time.gmtime())
