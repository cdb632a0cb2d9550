"""A server whose model is split over two devices: a rank that ends or hangs costs a restart, and none is left."""

import os
import signal
import time

import psutil
import pytest

from server.deployment import Deployment
from server.engine.head_start import ENGINE_COMMAND
from tests.server.live_server import REFERENCE, Running, running_server

START_S = 240.0
ASKED = {"prompt": "The captain", "max_tokens": 8, "temperature": 0}


def deployment(devices: int) -> Deployment:
    return Deployment.model_validate({
        "model": {"path": str(REFERENCE), "name": "reference"},
        "gpu": {"device": "cpu", "devices": devices, "kv_cache_gib": 0.05, "threads": 1},
        "scheduler": {"max_context_tokens": 512, "max_running": 4},
        "server": {"port": 0, "engine_quiet_seconds": 2, "engine_silence_seconds": 15},
    })  # fmt: skip


def find_rank(live: Running) -> psutil.Process:
    pid = live.service.supervisor.engine_pid
    assert pid is not None
    (rank,) = [one for one in psutil.Process(pid).children() if "scheduler.engine.rank_process" in one.cmdline()]
    return rank


async def say(live: Running) -> str:
    async def ready() -> bool:
        return (await live.http.get("/health")).status_code == 200

    await live.until(ready, START_S)
    answer = await live.http.post("/v1/completions", json=ASKED, timeout=START_S)
    return answer.json()["choices"][0]["text"]


@pytest.mark.long
@pytest.mark.timeout(900)
async def test_a_rank_that_ends_or_hangs_costs_a_restart_and_none_is_left(caplog: pytest.LogCaptureFixture) -> None:
    async with running_server(deployment(1), list(ENGINE_COMMAND), wait=False) as live:
        wanted = await say(live)
    async with running_server(deployment(2), list(ENGINE_COMMAND), wait=False) as live:
        assert await say(live) == wanted
        killed = find_rank(live)
        killed.kill()

        async def restarted() -> bool:
            return await live.metric("tandem_engine_restarts_total") == 1

        await live.until(restarted, START_S)
        assert "gpu.devices: rank 1 of 2: its process was killed by signal 9" in caplog.text
        assert await say(live) == wanted
        hung = find_rank(live)
        hung.send_signal(signal.SIGSTOP)
        lost = await live.http.post("/v1/completions", json=ASKED, timeout=START_S)
        assert (lost.status_code, lost.json()["error"]["code"]) == (503, "engine_hung")
        assert await say(live) == wanted
        last = find_rank(live)
        last.send_signal(signal.SIGSTOP)
    until = time.monotonic() + 20
    while time.monotonic() < until and any(map(psutil.pid_exists, (killed.pid, hung.pid, last.pid))):
        time.sleep(0.1)
    assert not [pid for pid in (killed.pid, hung.pid, last.pid) if psutil.pid_exists(pid)], os.getpid()
