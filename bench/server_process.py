"""Start a server for a measurement, and end it."""

import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import httpx

from bench.gate_error import GateError

_POLL_S = 0.25
_STOP_S = 90


@contextmanager
def serving(
    command: Callable[[int], Sequence[str]], load_timeout_s: float, log_file: Path | None = None
) -> Iterator[str]:
    """Start a server, and yield its address when it is healthy. It is ended by SIGTERM when the context ends.

    command: returns the command line for a port. log_file: gets the server's log.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with log_file.open("w+b") if log_file else tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command(port), stdout=subprocess.DEVNULL, stderr=log)
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_until_healthy(url, process, log, load_timeout_s)
            yield url
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_until_healthy(url: str, process: "subprocess.Popen[bytes]", log: IO[bytes], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        if process.poll() is not None:
            log.seek(0)
            said = log.read().decode(errors="replace").strip().splitlines() or ["nothing"]
            raise GateError(f"the server exited with status {process.returncode} while loading: {said[-1]}")
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        except httpx.TransportError:
            pass
        time.sleep(_POLL_S)
    raise GateError(f"the server was not healthy after {timeout_s:.0f} s")
