"""Ray Serve with two replicas on CPUs, by deploy/ray_serve.py: sessions, a server that is killed, scaling, the end."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.end_to_end.real_server import KV_CACHE_GIB, free_port
from tests.fleet.environments import ROOT, program_of
from tests.fleet.replicas import Conversation, cached_tokens, prompt_tokens
from tests.server.live_server import REFERENCE

pytestmark = [pytest.mark.long, pytest.mark.timeout(600)]
PAGE = 16
START_SECONDS = 240


class Cluster:
    """Ray with the deployment, its HTTP client, and what runs beneath it."""

    def __init__(self, process: subprocess.Popen[bytes], url: str, log: Path) -> None:
        self.process = process
        self.http = httpx.Client(base_url=url, timeout=120)
        self.log = log

    def replicas(self) -> set[str]:
        """Return the names of replicas that answer."""
        return {self.http.get("/version").headers["x-replica"] for _ in range(30)}

    def servers(self) -> list[psutil.Process]:
        tree = psutil.Process(self.process.pid).children(recursive=True)
        return [one for one in tree if "serve" in command_of(one) and command_of(one)[0] != "sh"]

    def wait_for(self, what: str, is_so: Callable[[], bool]) -> None:
        ends = time.monotonic() + START_SECONDS
        while not is_so():
            assert self.process.poll() is None, self.log.read_text()[-4000:]
            assert time.monotonic() < ends, f"{what}: {self.log.read_text()[-4000:]}"
            time.sleep(0.5)

    def answers(self) -> bool:
        try:
            return self.http.get("/health", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]


@contextmanager
def running_cluster(folder: Path, *options: str) -> Iterator[Cluster]:
    """Serve the reference model, one request at a time in each replica."""
    tree = {
        "model": {"path": str(REFERENCE), "name": "reference"},
        "gpu": {"device": "cpu", "dtype": "float32", "kv_cache_gib": KV_CACHE_GIB, "threads": 1},
        "scheduler": {"max_running": 1},
        "server": {"drain_seconds": 20},
    }
    (folder / "server.yaml").write_text(yaml.safe_dump(tree))
    port = free_port()
    program = [str(program_of("ray", "python")), str(ROOT / "deploy" / "ray_serve.py"), str(folder / "server.yaml")]
    fixed = [
        "--tandem",
        str(Path(sys.executable).with_name("tandem")),
        "--gpus",
        "0",
        "--cpus",
        "0.1",
        "--port",
        str(port),
    ]
    environment = {"PYTHONPATH": str(ROOT), "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1"}
    log = folder / "ray.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*program, *fixed, *options], env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        )
    cluster = Cluster(process, f"http://127.0.0.1:{port}", log)
    try:
        cluster.wait_for("an answer", cluster.answers)
        yield cluster
    finally:
        left = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        finally:
            process.kill()
            cluster.http.close()
            _, alive = psutil.wait_procs(left, timeout=30)
            for one in alive:
                one.kill()
    assert alive == [], "what was started ends with it"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    program_of("ray", "python")
    with running_cluster(tmp_path_factory.mktemp("two"), "--min-replicas", "2") as cluster:
        yield cluster


@pytest.fixture
def both(two: Cluster) -> Cluster:
    two.wait_for("two replicas", lambda: len(two.replicas()) == 2)
    return two


def test_turns_of_a_session_go_to_one_replica(both: Cluster) -> None:
    sessions = {f"session-{number}": Conversation(600 + number) for number in range(8)}
    first = {name: one.say(both.http, {"x-session-id": name}) for name, one in sessions.items()}
    second = {name: one.say(both.http, {"x-session-id": name}) for name, one in sessions.items()}
    assert len({response.headers["x-replica"] for response in first.values()}) == 2, "both have some"
    for name, response in second.items():
        assert response.headers["x-replica"] == first[name].headers["x-replica"]
        assert cached_tokens(response) > prompt_tokens(first[name]) - PAGE


def test_streams_and_refusals_pass_as_the_server_wrote_them(both: Cluster) -> None:
    body = Conversation(700, 20).body(max_tokens=40, min_tokens=40, stream=True)
    begun = time.monotonic()
    with both.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        times = [(time.monotonic() - begun, line) for line in stream.iter_lines() if line]
    assert times[-1][1] == "data: [DONE]"
    assert len(times) > 40
    assert times[0][0] < times[-1][0] / 2, "tokens come as they are drawn"
    refused = both.http.post("/v1/chat/completions", json=body | {"attention_profile": "none such"})
    assert refused.status_code == 400
    assert "unknown profile" in refused.json()["error"]["message"]
    assert both.http.get("/v1/models/none-such").status_code == 404


def test_a_client_that_goes_ends_its_request(both: Cluster) -> None:
    body = Conversation(710, 20).body(max_tokens=5000, min_tokens=5000, stream=True)
    headers = {"x-session-id": "one that goes"}
    with both.http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as stream:
        next(stream.iter_lines())
    begun = time.monotonic()
    Conversation(711, 20).say(both.http, headers)
    assert time.monotonic() - begun < 20, "its replica has one slot, which 5,000 tokens hold for a minute"


def test_requests_go_on_when_a_server_is_killed_and_another_is_started(both: Cluster) -> None:
    before = both.replicas()
    server = both.servers()[0]
    server.kill()
    time.sleep(0.5)
    for number in range(12):
        Conversation(800 + number, 20).say(both.http, max_tokens=1)
    both.wait_for("two replicas again", lambda: len(both.replicas()) == 2)
    assert len(both.replicas() & before) == 1


def ask_until_two(cluster: Cluster, pool: ThreadPoolExecutor) -> None:
    """Keep six requests in a server with one slot until there is a second replica, and wait for their answers."""
    ends = time.monotonic() + START_SECONDS
    asked: list[Future[httpx.Response]] = []
    while len(cluster.replicas()) < 2:
        assert time.monotonic() < ends, cluster.log.read_text()[-4000:]
        asked = [one for one in asked if not one.done()]
        for number in range(6 - len(asked)):
            conversation = Conversation(900 + number, 20)
            asked.append(pool.submit(conversation.say, cluster.http, None, max_tokens=64, min_tokens=64))
        time.sleep(0.5)
    for one in asked:
        assert one.result().status_code == 200


def read_stream(cluster: Cluster, session: str) -> list[str]:
    body = Conversation(950, 20).body(max_tokens=1200, min_tokens=1200, stream=True)
    with cluster.http.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}) as stream:
        return [line for line in stream.iter_lines() if line]


def test_replicas_come_while_requests_wait_and_go_behind_their_streams(tmp_path: Path) -> None:
    scaling = ("--waiting", "1", "--up-seconds", "1", "--down-seconds", "1", "--drain-seconds", "120")
    with running_cluster(tmp_path, *scaling) as cluster, ThreadPoolExecutor(6) as pool:
        assert len(cluster.replicas()) == 1
        ask_until_two(cluster, pool)
        names = [f"session-{number}" for number in range(20)]
        placed = {
            cluster.http.get("/version", headers={"x-session-id": one}).headers["x-replica"]: one for one in names
        }
        streams = [pool.submit(read_stream, cluster, session) for session in placed.values()]
        cluster.wait_for("one replica", lambda: len(cluster.replicas()) == 1)
        assert not any(stream.done() for stream in streams), "the one that goes still has its stream"
        assert len(placed) == 2
        for stream in streams:
            assert stream.result()[-1] == "data: [DONE]"
        cluster.wait_for("one server", lambda: len(cluster.servers()) == 1)
