"""Serve one model by Ray Serve. Each replica is a server with its own GPU; replicas are added while requests wait.

    pip install '.[cuda,ray]'
    python deploy/ray_serve.py deploy/rtx4090.yaml --max-replicas 4

starts Ray on this machine, or joins the cluster that RAY_ADDRESS names. The file and the model must have the same paths
on each of its machines. `serve run deploy.ray_serve:build config=FILE` does the same.
"""

import argparse
import asyncio
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # Ray reports no usage to its makers

import aiohttp
import ray
from prometheus_client.parser import text_string_to_metric_families
from pydantic import BaseModel, Field
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, RequestRouterConfig
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"  # by the header x-session-id
HELD = ("tandem_requests_running", "tandem_requests_prefilling", "tandem_requests_waiting")
OF_THE_CONNECTION = {"connection", "keep-alive", "transfer-encoding", "te", "upgrade", "host", "content-length"}
OF_THE_PROXY = {"date", "server", "x-request-id"}  # headers that the proxy adds to answers itself
END_SECONDS = 20  # time for a server to end after its drain
# The pipe closes when the replica ends in any way, and the server then ends, too.
KEEPER = 'exec 3<&0; "$@" 3<&- & server=$!; { read -r _ <&3; kill "$server"; } 2>/dev/null & wait "$server"'


class Arguments(BaseModel):
    """The arguments of `build`."""

    config: str = Field(description="the server's file")
    tandem: str = Field("", description="the program; left out: the one beside this interpreter, or of PATH")
    gpus: float = Field(1, description="of Ray's, for each replica")
    cpus: float = Field(1, description="of Ray's, for each replica")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(2, ge=1)
    waiting: float = Field(2, gt=0, description="requests that wait in a replica, on average, before there are more")
    held: float = Field(8, gt=0, description="requests that a replica holds, on average, before one more is kept")
    up_seconds: float = Field(30, ge=0, description="that requests wait before there are more")
    down_seconds: float = Field(600, ge=0, description="that fewer would do before there are fewer")
    drain_seconds: float = Field(60, ge=0, description="no less than server.drain_seconds")


class ByWaiting:
    """Decides the number of replicas: more while requests wait for admission, fewer if fewer can hold all requests."""

    def __init__(self, waiting: float, held: float) -> None:
        self._waiting, self._held = waiting, held

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        sums = {name: sum(of_replica.values()) for name, of_replica in (context.aggregated_metrics or {}).items()}
        waiting, held, now = sums.get("waiting", 0.0), sums.get("held", 0.0), context.current_num_replicas
        if waiting > self._waiting * now:
            return max(now + 1, math.ceil(waiting / self._waiting)), {}
        return min(context.target_num_replicas, max(1, math.ceil(held / self._held))), {}


class Replica:
    """A server on a free port of this machine, to which requests are passed on."""

    def __init__(self, arguments: Arguments) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._name = serve.get_replica_context().replica_id.unique_id
        self._url = f"http://127.0.0.1:{port}"
        self._drain_seconds = arguments.drain_seconds
        self._is_ending = False
        self._session: aiohttp.ClientSession | None = None
        beside = Path(sys.executable).with_name("tandem")
        program = arguments.tandem or (str(beside) if beside.exists() else "tandem")
        command = [program, "serve", arguments.config, "--host", "127.0.0.1", "--port", str(port)]
        self._server = subprocess.Popen(["sh", "-c", KEEPER, "sh", *command], stdin=subprocess.PIPE)
        while not self._answers("/health"):
            if self._server.poll() is not None:
                status = self._server.returncode
                raise RuntimeError(f"{' '.join(command)}: ended with status {status}; its last lines are above")
            time.sleep(0.5)
        threading.Thread(target=self._end_with_server, daemon=True).start()

    def _end_with_server(self) -> None:
        """End this process if the server ends unexpectedly: Ray then uses the other replicas, and starts a new one."""
        self._server.wait()
        if not self._is_ending:
            os._exit(1)

    def _answers(self, path: str) -> bool:
        try:
            with urllib.request.urlopen(self._url + path, timeout=5) as answer:
                return answer.status == 200
        except (urllib.error.URLError, TimeoutError, ConnectionError):
            return False

    async def check_health(self) -> None:
        """Raise if only a new replica helps; Ray then starts one."""
        if not await asyncio.to_thread(self._answers, "/live"):
            raise RuntimeError(f"{self._url}/live: the server does not answer 200")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the numbers of requests that wait for admission, and that the server holds."""
        async with self._http().get(f"{self._url}/metrics") as answer:
            found = {family.name: family.samples for family in text_string_to_metric_families(await answer.text())}
        held = {name: sum(sample.value for sample in found[name]) for name in HELD}
        return {"waiting": held["tandem_requests_waiting"], "held": sum(held.values())}

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)
            timeout = aiohttp.ClientTimeout(total=None)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, auto_decompress=False)
        return self._session

    async def __call__(self, request: Request) -> Response:
        """Pass a request on, and stream the answer back. A client that disconnects ends both."""
        query = f"?{request.url.query}" if request.url.query else ""
        answer = await self._http().request(
            request.method,
            f"{self._url}{request.url.path}{query}",
            headers=_passed(request.headers.items()),
            data=await request.body() or None,
            allow_redirects=False,
            skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
        )

        async def body() -> Any:
            try:
                async for part in answer.content.iter_any():
                    yield part
            finally:
                answer.close()

        headers = _passed(answer.headers.items(), OF_THE_PROXY) | {"x-replica": self._name}
        return StreamingResponse(body(), answer.status, headers)

    def __del__(self) -> None:
        """End the server as SIGTERM does: requests that have begun may finish."""
        if not hasattr(self, "_server"):
            return
        self._is_ending = True
        assert self._server.stdin is not None
        self._server.stdin.close()
        try:
            self._server.wait(self._drain_seconds + END_SECONDS)
        except subprocess.TimeoutExpired:
            self._server.kill()


def _passed(headers: Any, dropped: Collection[str] = ()) -> dict[str, str]:
    return {name: value for name, value in headers if name.lower() not in OF_THE_CONNECTION | set(dropped)}


def build(arguments: Arguments) -> serve.Application:
    """Return the application: the deployment with its resources, its scaling and its router."""
    arguments = arguments.model_copy(update={"config": str(Path(arguments.config).resolve())})
    scaling = AutoscalingConfig(
        min_replicas=arguments.min_replicas,
        max_replicas=arguments.max_replicas,
        upscale_delay_s=arguments.up_seconds,
        downscale_delay_s=arguments.down_seconds,
        policy=AutoscalingPolicy(
            policy_function=ByWaiting, policy_kwargs={"waiting": arguments.waiting, "held": arguments.held}
        ),
    )
    return serve.deployment(
        Replica,
        name="tandem",
        ray_actor_options={"num_gpus": arguments.gpus, "num_cpus": arguments.cpus},
        autoscaling_config=scaling,
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_ongoing_requests=1000,  # requests wait in the server, which orders them
        graceful_shutdown_timeout_s=arguments.drain_seconds + END_SECONDS,
        health_check_period_s=2,
        health_check_timeout_s=10,
    ).bind(arguments)


def main() -> None:
    """Serve until Ctrl-C or SIGTERM; both drain the servers."""
    parser = argparse.ArgumentParser(description="Serve a configuration file by Ray Serve.")
    parser.add_argument("config")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    for name, field in Arguments.model_fields.items():
        if name != "config":
            kind, default, told = field.annotation, field.default, field.description
            parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=default, help=told)
    given = vars(parser.parse_args())
    address = {"host": given.pop("host"), "port": given.pop("port")}
    ray.init(log_to_driver=True)
    serve.start(http_options=address)
    serve.run(build(Arguments(**given)))
    told = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: told.set())
    told.wait()
    serve.shutdown()


if __name__ == "__main__":
    main()
