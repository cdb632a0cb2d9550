"""Find the processes of a server on this machine, kill its engine, and measure their memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

import numpy as np
import psutil

_ENGINE_MODULE = "scheduler.engine.engine_process"
_LOCAL = ("127.0.0.1", "localhost", "::1")


class ServerProcesses:
    """The processes of a server: the one that listens, its engine, and its other children."""

    def __init__(self, pid: int) -> None:
        self._server = psutil.Process(pid)

    def find_engine(self) -> psutil.Process | None:
        """Return the running engine; None between two engines, and after the server has ended."""
        try:
            return next((one for one, role in self._roles() if role == "engine"), None)
        except psutil.NoSuchProcess:
            return None

    def resident_bytes(self) -> dict[str, int]:
        """Return resident memory by role: server, engine, children (template renderers and grammar compilers)."""
        found: dict[str, int] = {}
        for process, role in self._roles():
            try:
                found[role] = found.get(role, 0) + process.memory_info().rss
            except psutil.NoSuchProcess:
                continue
        return found

    def _roles(self) -> list[tuple[psutil.Process, str]]:
        roles = [(self._server, "server")]
        for child in self._server.children(recursive=True):
            try:
                roles.append((child, "engine" if _ENGINE_MODULE in child.cmdline() else "children"))
            except psutil.NoSuchProcess:
                continue
        return roles


def find_server(url: str) -> ServerProcesses | None:
    """Return the processes of the server that listens at an address of this machine; None for another machine's or
    another user's.
    """
    parts = urlsplit(url)
    if parts.hostname not in _LOCAL:
        return None
    port = parts.port or (443 if parts.scheme == "https" else 80)
    try:
        listening = [one for one in psutil.net_connections("tcp") if one.status == psutil.CONN_LISTEN]
    except psutil.AccessDenied:
        return None
    pid = next((one.pid for one in listening if one.laddr.port == port and one.pid is not None), None)
    return None if pid is None else ServerProcesses(pid)


@dataclass(frozen=True, slots=True)
class Trend:
    """The line through samples of memory by least squares. seconds: from the first sample to the last."""

    seconds: float
    last_bytes: int
    bytes_a_second: float

    @property
    def growth_bytes(self) -> float:
        return self.bytes_a_second * self.seconds


def fit_trend(samples: Sequence[tuple[float, int]]) -> Trend | None:
    """Return the trend of (seconds, bytes); None for fewer than two samples."""
    if len(samples) < 2:
        return None
    seconds, sizes = np.array(samples, np.float64).T
    slope = float(np.polyfit(seconds - seconds[0], sizes, 1)[0])
    return Trend(float(seconds[-1] - seconds[0]), samples[-1][1], slope)
