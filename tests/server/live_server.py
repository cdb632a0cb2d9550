"""Servers for tests: the application in this process's event loop, over a real socket, with the fake engine."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path

import httpx
import uvicorn
from fastapi import FastAPI
from openai import AsyncOpenAI

from gpu.memory.plan import MemoryPlan
from server.deployment import Deployment
from server.engine.start_events import OnStart
from server.http.app import OtherModels, _bind, create_app, http_config
from server.planning.deployment_plan import resolve_plan
from server.planning.side_by_side import ONE_AT_A_TIME, Room
from server.service.service import Service
from transfer.host_config import DocumentsConfig
from transfer.machine import load_machine

ROOT = Path(__file__).parents[2]
REFERENCE = ROOT / "deploy" / "models" / "reference"
LAPTOP = ROOT / "deploy" / "machines" / "laptop.json"
FAKE_ENGINE = Path(__file__).parent / "fake_engine.py"


def fake_command(**settings: float | str | list[float]) -> list[str]:
    start = f"runpy.run_path({str(FAKE_ENGINE)!r}, run_name='__main__')"
    code = f"import sys, runpy; sys.path.insert(0, {str(ROOT)!r}); {start}"
    return [sys.executable, "-c", code, json.dumps(settings)]


class Running:
    """Hold a live server: its address, its application, and clients for it."""

    def __init__(self, app: FastAPI, url: str) -> None:
        self.app = app
        self.url = url
        self.service: Service = app.state.service
        self.http = httpx.AsyncClient(base_url=url, timeout=20)
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key="k", max_retries=0, timeout=20)

    async def until(self, holds: Callable[[], Awaitable[bool]], seconds: float = 10) -> None:
        async with asyncio.timeout(seconds):
            while not await holds():
                await asyncio.sleep(0.02)

    async def until_ready(self) -> None:
        async def ready() -> bool:
            return (await self.http.get("/health")).status_code == 200

        await self.until(ready)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.split("{")[0].split(" ")[0] == name)


def plan_of(deployment: Deployment) -> MemoryPlan:
    """Plan the memory of any machine; the fake engine allocates nothing."""
    return resolve_plan(deployment, load_machine(LAPTOP)).memory


def make_app(
    deployment: Deployment,
    command: list[str],
    on_start: OnStart | None = None,
    others: Sequence[Deployment] = (),
    room: Room = ONE_AT_A_TIME,
) -> FastAPI:
    beside = OtherModels(tuple((one, plan_of(one)) for one in others), room)
    return create_app(deployment, plan_of(deployment), command, on_start, others=beside)


def make_deployment(**server: object) -> Deployment:
    tree = {"model": {"path": REFERENCE, "name": "reference"}, "server": {"port": 0, **server}}
    return Deployment.model_validate(tree)


def with_documents(deployment: Deployment, folder: Path, **settings: object) -> Deployment:
    config = DocumentsConfig.model_validate({"folder": folder, "memory_limit_gib": 0.25, **settings})
    return deployment.model_copy(update={"documents": config})


@asynccontextmanager
async def running_server(
    deployment: Deployment,
    command: list[str],
    wait: bool = True,
    on_start: OnStart | None = None,
    others: Sequence[Deployment] = (),
    room: Room = ONE_AT_A_TIME,
) -> AsyncIterator[Running]:
    app = make_app(deployment, command, on_start, others, room)
    listener = _bind("127.0.0.1", 0)
    server = uvicorn.Server(http_config(app))
    server.capture_signals = nullcontext
    task = asyncio.create_task(server.serve(sockets=[listener]))
    running = Running(app, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        async with asyncio.timeout(20):
            while not server.started:
                await asyncio.sleep(0.005)
        if wait:
            await running.until_ready()
        yield running
    finally:
        await running.http.aclose()
        await running.openai.close()
        server.should_exit = True
        await task
