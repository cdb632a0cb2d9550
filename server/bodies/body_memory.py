"""Limit the memory of request bodies while they are read: of one body, and of all of them together."""

from server.api_error import body_too_large, unavailable


class BodyMemory:
    """Count the bytes of bodies that are being read. `mib`: the most of one body; `all_mib`: of all together."""

    def __init__(self, mib: float, all_mib: float, retry_after_seconds: int) -> None:
        self._mib = mib
        self._all_mib = max(mib, all_mib)
        self._retry_after_seconds = retry_after_seconds
        self.num_taken_bytes = 0

    def check(self, num_bytes: int) -> None:
        """Check the size of one body. Raises ApiError 413."""
        if num_bytes > self._mib * 2**20:
            raise body_too_large(self._mib)

    def take(self, num_bytes: int) -> None:
        """Count more bytes of a body.

        Raises ApiError 503, and counts nothing, if all bodies together would exceed their limit.
        """
        if self.num_taken_bytes + num_bytes > self._all_mib * 2**20:
            what = f"server: request bodies in progress use all {self._all_mib:g} MiB (server.max_bodies_mib)"
            raise unavailable(what, "overloaded", self._retry_after_seconds)
        self.num_taken_bytes += num_bytes

    def give(self, num_bytes: int) -> None:
        self.num_taken_bytes -= num_bytes
