"""Read `keep_alive`: how long a model stays loaded after a request."""

import math
import re

from server.api_error import invalid

FOREVER = math.inf
_UNITS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_PART = re.compile(r"(\d+(?:\.\d+)?)(ns|us|µs|ms|s|m|h)")
PATTERN = r"^-?([0-9]{1,9}(\.[0-9]{1,9})?|([0-9]{1,9}(\.[0-9]{1,9})?(ns|us|µs|ms|s|m|h)){1,9})$"
_DURATION = re.compile(PATTERN)

KeepAlive = float | str


def read_keep_alive(given: KeepAlive | None) -> float | None:
    """Return the seconds of a `keep_alive`; None: the request does not set it. Raises ApiError 400.

    It is a number of seconds, or a text in Go's format of durations ("5m", "1h30m"). Values below 0 mean FOREVER.
    """
    if given is None:
        return None
    seconds = given
    if isinstance(seconds, str):
        if not _DURATION.search(seconds) or seconds.endswith("\n"):
            wanted = 'wanted seconds, or a text like "5m"; below 0: it stays'
            raise invalid("keep_alive", f"got {seconds[:80]!r}, {wanted}")
        parts = [float(number) * _UNITS[unit] for number, unit in _PART.findall(seconds)]
        size = sum(parts) if parts else float(seconds.lstrip("-"))
        seconds = -size if seconds.startswith("-") else size
    return FOREVER if seconds < 0 else float(seconds)
