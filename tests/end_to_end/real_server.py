"""A real server, as a user would start it: `tandem serve` on a configuration file, talked to over HTTP."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import yaml

REPOSITORY = Path(__file__).parents[2]
KV_CACHE_GIB = 0.5
START_SECONDS = 200  # without numba's caches and with both cores busy it took 130


class ServerProcess:
    """`url` serves; `process` is the API process, its child the engine."""

    def __init__(self, process: subprocess.Popen, url: str, log: Path) -> None:
        self.process = process
        self.url = url
        self.log = log

    @property
    def engine(self) -> psutil.Process:
        for child in psutil.Process(self.process.pid).children(recursive=True):
            if "scheduler.engine.engine_process" in child.cmdline():
                return child
        raise AssertionError("no engine process")

    def resident_bytes(self) -> int:
        """Of both processes, memory that is theirs alone."""
        return sum(process.memory_info().rss for process in (psutil.Process(self.process.pid), self.engine))

    def metric(self, name: str) -> float:
        for line in httpx.get(f"{self.url}/metrics").text.splitlines():
            if line.split(" ")[0] == name:
                return float(line.split(" ")[1])
        raise AssertionError(f"no metric {name}")

    def wait_until_healthy(self) -> None:
        ends = time.monotonic() + START_SECONDS
        while time.monotonic() < ends:
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            try:
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError(self.log.read_text()[-4000:])


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@contextmanager
def running_server(folder: Path, changes: dict) -> Iterator[ServerProcess]:
    """Serve the reference model with `changes` merged over a small float32 configuration, section by section."""
    tree: dict = {
        "model": {"path": str(REPOSITORY / "deploy/models/reference"), "name": "reference"},
        "gpu": {"device": "cpu", "dtype": "float32", "kv_cache_gib": KV_CACHE_GIB, "threads": 1},
        "server": {"port": free_port(), "drain_seconds": 5},
    }
    for section, values in changes.items():
        tree.setdefault(section, {}).update(values)
    if tree["gpu"]["dtype"] == "float32":
        tree["gpu"].setdefault("kv", "float32")
    config = folder / "server.yaml"
    config.write_text(yaml.safe_dump(tree))
    log = folder / "server.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "server.commands", "serve", str(config)],
            cwd=REPOSITORY,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])},
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    server = ServerProcess(process, f"http://127.0.0.1:{tree['server']['port']}", log)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
