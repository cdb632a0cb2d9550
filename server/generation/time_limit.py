"""Choose how long one API call may take: the least of what its body, its header and the deployment allow."""

import re

from starlette.datastructures import Headers

from server.api_error import invalid
from server.bodies.ranges import MOST_SECONDS

TIME_HEADER = "x-request-timeout"

_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def choose_limit(headers: Headers, asked: float | None, most: float | None) -> float | None:
    """Return seconds, or None without a limit. Raises ApiError 400 for a header that is no number of seconds."""
    given = headers.get(TIME_HEADER)
    if given is not None and (_SECONDS.fullmatch(given) is None or not 0 < float(given) <= MOST_SECONDS):
        raise invalid(TIME_HEADER, f"got {given[:40]!r}, wanted seconds, above 0 to {MOST_SECONDS}")
    limits = [limit for limit in (asked, most, None if given is None else float(given)) if limit is not None]
    return min(limits, default=None)
