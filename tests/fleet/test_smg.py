"""smg before two servers, by deploy/smg.sh: second turns, a replica that is killed, and one that drains."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tests.end_to_end.real_server import free_port
from tests.fleet.environments import ROOT, program_of
from tests.fleet.replicas import Conversation, Replicas, cached_tokens, prompt_tokens

pytestmark = pytest.mark.long
SCRIPT = ROOT / "deploy" / "smg.sh"
PAGE = 16  # tokens that a prefix is found by
WAIT_SECONDS = 60


class Router:
    """smg before replicas, and its HTTP client."""

    def __init__(self, replicas: Replicas, log: Path) -> None:
        self.replicas = replicas
        port = free_port()
        own = {"SMG": str(program_of("smg", "smg")), "PORT": str(port), "METRICS_PORT": str(free_port())}
        self._log = log.open("w")
        self.process = subprocess.Popen(
            [str(SCRIPT), *replicas.urls], env=os.environ | own, stdout=self._log, stderr=subprocess.STDOUT
        )
        self.http = httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120)

    def wait_for(self, num_healthy: int) -> None:
        ends = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                found = self.http.get("/readiness").json()
                if found.get("healthy_workers") == num_healthy:
                    return
            except httpx.TransportError as error:
                found = error
            assert self.process.poll() is None, Path(self._log.name).read_text()[-4000:]
            assert time.monotonic() < ends, found
            time.sleep(0.2)

    def close(self) -> None:
        self.http.close()
        self.process.kill()
        self.process.wait()
        self._log.close()


@pytest.fixture(scope="module")
def router_of_module(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    program_of("smg", "smg")
    folder = tmp_path_factory.mktemp("fleet")
    with Replicas(folder) as replicas:
        router = Router(replicas, folder / "smg.log")
        try:
            yield router
        finally:
            router.close()


@pytest.fixture
def router(router_of_module: Router) -> Router:
    """Return the router with both replicas behind it, whatever another test did to them."""
    router_of_module.replicas.start_missing()
    router_of_module.wait_for(2)
    return router_of_module


def served_by(response: httpx.Response) -> str:
    return response.headers["x-smg-routed-worker-id"]


def begin_on_both(router: Router, seed: int) -> dict[str, Conversation]:
    """Hold first turns until each replica has had one, and return a conversation of each."""
    begun: dict[str, Conversation] = {}
    for number in range(20):
        conversation = Conversation(seed + number)
        begun[served_by(conversation.say(router.http))] = conversation
        if len(begun) == 2:
            return begun
    raise AssertionError(f"20 conversations all went to {list(begun)}")


def test_second_turns_go_to_the_replicas_that_have_the_first(router: Router) -> None:
    conversations = [Conversation(100 + number) for number in range(8)]
    first = [conversation.say(router.http) for conversation in conversations]
    second = [conversation.say(router.http) for conversation in conversations]
    assert {served_by(response) for response in first} == set(router.replicas.urls), "both have some"
    assert [served_by(response) for response in second] == [served_by(response) for response in first]
    for one, two in zip(first, second, strict=True):
        assert cached_tokens(one) < PAGE
        assert cached_tokens(two) > prompt_tokens(one) - PAGE


def test_requests_go_on_when_a_replica_is_killed(router: Router) -> None:
    begun = begin_on_both(router, 200)
    killed = router.replicas.urls[0]
    router.replicas.servers[killed].process.kill()
    rest = router.replicas.other(killed)
    orphan, kept = begun[killed].say(router.http), begun[rest].say(router.http)
    assert [served_by(orphan), served_by(kept)] == [rest, rest]
    assert cached_tokens(orphan) < PAGE, "its prefix was in the one that is gone, and is computed again"
    assert cached_tokens(kept) > 0
    with ThreadPoolExecutor(4) as pool:
        more = list(pool.map(lambda number: Conversation(300 + number, 40).say(router.http), range(12)))
    assert {served_by(response) for response in more} == {rest}
    router.wait_for(1)


def test_a_replica_that_drains_ends_what_it_has_and_gets_nothing_new(router: Router) -> None:
    begun = begin_on_both(router, 400)
    drained = router.replicas.urls[1]
    rest, server = router.replicas.other(drained), router.replicas.servers[drained]
    body = begun[drained].body(max_tokens=500, min_tokens=500, stream=True)
    with router.http.stream("POST", "/v1/chat/completions", json=body) as stream:
        assert served_by(stream) == drained
        events = (line for line in stream.iter_lines() if line)
        next(events)
        server.process.send_signal(signal.SIGTERM)
        with httpx.Client(base_url=drained) as direct:
            while (health := direct.get("/health")).status_code == 200:
                time.sleep(0.01)
            assert health.json() == {"status": "draining"}
            refused = direct.post("/v1/chat/completions", json=Conversation(500).body())
            assert refused.status_code == 503
            assert refused.json()["error"]["code"] == "draining"
        moved = [begun[drained].say(router.http, max_tokens=1) for _ in range(3)]
        moved += [Conversation(500 + number, 40).say(router.http, max_tokens=1) for number in range(4)]
        assert {served_by(response) for response in moved} == {rest}
        assert server.process.poll() is None, "the stream is longer than what was asked beside it"
        told = list(events)
    assert told[-1] == "data: [DONE]"
    assert sum('"finish_reason":"length"' in line for line in told) == 1
    assert server.process.wait(timeout=WAIT_SECONDS) == 0


def test_a_server_has_the_metrics_that_the_page_names(router: Router) -> None:
    named = re.findall(r"`((?:vllm:|tandem_)\w+)`", (ROOT / "docs" / "DEPLOYMENT.md").read_text())
    served = httpx.get(f"{router.replicas.urls[0]}/metrics").text
    assert "vllm:num_requests_waiting" in named
    assert [name for name in named if f"# TYPE {name} gauge" not in served] == []


def test_a_router_without_servers_says_what_it_wants() -> None:
    done = subprocess.run([str(SCRIPT)], capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("smg.sh: no servers; name their addresses")
