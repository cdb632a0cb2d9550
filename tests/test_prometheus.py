"""A real Prometheus scrapes a server under load: its rules are evaluated, and each query of the dashboard has a series.

`make test-prometheus` runs this; Debian has the program (`apt-get install prometheus`).
"""

import asyncio
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from bench.server_process import serving
from bench.soak.requests import Mix
from bench.soak.soak_run import SoakPlan, run_soak

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
LOAD_SECONDS = 20.0
MIX = Mix(prompts=2, longest_tokens=1500, answer_tokens=32, profiles=None)
WAIT_SECONDS = 40.0


@contextmanager
def scraping(folder: Path, url: str) -> Iterator[str]:
    """Run Prometheus with the shipped configuration, but for addresses and intervals; give its address."""
    tree = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    tree["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
    tree["rule_files"] = [str(DEPLOY / name) for name in tree["rule_files"]]
    tree["scrape_configs"][0]["static_configs"] = [{"targets": [url.removeprefix("http://")]}]
    (folder / "prometheus.yml").write_text(yaml.safe_dump(tree))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    command = ["prometheus", f"--config.file={folder / 'prometheus.yml'}", f"--storage.tsdb.path={folder / 'data'}",
               f"--web.listen-address={address}"]  # fmt: skip
    with (folder / "prometheus.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield f"http://{address}/api/v1"
    finally:
        process.terminate()
        process.wait(30)


def ask(api: str, path: str, **parameters: str) -> Any:
    """Return the data of an answer of Prometheus's API, once it answers."""
    ends = time.monotonic() + WAIT_SECONDS
    while True:
        try:
            answer = httpx.get(f"{api}/{path}", params=parameters, timeout=10).json()
            break
        except (httpx.TransportError, ValueError):
            assert time.monotonic() < ends
            time.sleep(0.2)
    assert answer["status"] == "success", answer
    return answer["data"]


def alert_states(api: str) -> dict[str, str]:
    rules = [rule for group in ask(api, "rules")["groups"] for rule in group["rules"]]
    return {rule["name"]: rule["state"] for rule in rules if rule["type"] == "alerting"}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="no Prometheus: apt-get install prometheus")
def test_each_query_of_the_dashboard_has_a_series_and_rules_are_evaluated(tmp_path: Path, subtests: Any) -> None:
    tree = yaml.safe_load((DEPLOY / "soak.yaml").read_text())
    tree["model"]["path"] = str(DEPLOY / "models" / "reference")
    tree["documents"]["folder"] = str(tmp_path / "documents")
    config = tmp_path / "deployment.yaml"
    config.write_text(yaml.safe_dump(tree))
    program = [sys.executable, "-m", "server.commands", "serve", str(config), "--host", "127.0.0.1", "--port"]
    server = ExitStack()
    url = server.enter_context(serving(lambda port: [*program, str(port)], 300))
    with server, scraping(tmp_path, url) as api:
        asyncio.run(run_soak(SoakPlan(url, None, LOAD_SECONDS, 0, 4, MIX, 1e-3, 0)))
        time.sleep(2.0)
        dashboard = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
        queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
        for query in queries:
            with subtests.test(query):
                assert ask(api, "query", query=query)["result"]
        rules = [rule for group in ask(api, "rules")["groups"] for rule in group["rules"]]
        assert [(rule["name"], rule["health"]) for rule in rules if rule["health"] != "ok"] == []
        recorded = [rule["name"] for rule in rules if rule["type"] == "recording"]
        assert [name for name in recorded if not ask(api, "query", query=name)["result"]] == []
        assert set(alert_states(api).values()) == {"inactive"}
        version = ask(api, "status/buildinfo")["version"]
        print(f"Prometheus {version}: {len(queries)} queries, {len(rules)} rules")
        server.close()
        ends = time.monotonic() + WAIT_SECONDS
        while alert_states(api)["TandemDown"] == "inactive":
            assert time.monotonic() < ends, "the server is gone, and Prometheus does not say so"
            time.sleep(0.5)
