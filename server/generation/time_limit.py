"""Choose the time limit of one API call: the least of the limits of its body, its header and the deployment."""

import re

from starlette.datastructures import Headers

from server.api_error import invalid
from server.bodies.ranges import MOST_SECONDS

TIME_HEADER = "x-request-timeout"

_SECONDS = re.compile(r"[0-9]+(\.[0-9]+)?([eE][+-]?[0-9]+)?")


def choose_limit(headers: Headers, asked: float | None, most: float | None) -> float | None:
    """Return the limit in seconds; None: no limit. Raises ApiError 400 if the header is not a number of seconds."""
    given = headers.get(TIME_HEADER)
    if given is not None and (_SECONDS.fullmatch(given) is None or not 0 < float(given) <= MOST_SECONDS):
        raise invalid(TIME_HEADER, f"got {given[:40]!r}, wanted seconds, above 0 to {MOST_SECONDS}")
    limits = [limit for limit in (asked, most, None if given is None else float(given)) if limit is not None]
    return min(limits, default=None)
