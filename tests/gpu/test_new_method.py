"""A method that is one folder, which nothing names, is configured, planned, served, counted and evaluated."""

import io
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from rich.console import Console

import gpu.methods
from evals.serving import DecodeRequest, ServingEngine
from gpu.methods.registry import list_methods
from gpu.profiles import add_by_name, why_unknown
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig
from server.commands.configuration_page import write_page
from server.commands.placements_page import print_comparison
from server.deployment import Deployment
from server.planning.default_profile import whole_readers
from server.planning.deployment_plan import resolve_plan
from server.planning.placements import compare_placements
from tests.server.live_server import LAPTOP, REFERENCE
from tests.server.test_end_to_end import serve
from transfer.machine import load_machine
from transfer.machine_rates import find_rates
from transfer.measured import measured_path

FOLDER = Path(__file__).parent / "new_method"
HOST = {"memory_limit_gib": 0.2, "threads": 1, "resident_tokens": 256, "residency": "fixed"}
PROFILES = {"half": {"host": {"method": "alternate", "first": 1}}}
SITE = "import gpu.methods\ngpu.methods.__path__.append({folder!r})\n"


@pytest.fixture
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder outside of the project that holds the method, for this process and those that it starts."""
    folder = tmp_path / "methods"
    shutil.copytree(FOLDER, folder)
    (folder / "sitecustomize.py").write_text(SITE.format(folder=str(folder)))
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setattr(gpu.methods, "__path__", [*gpu.methods.__path__, str(folder)])
    for name in ("gpu.methods.alternate", "gpu.methods.alternate.device"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return folder


def read_counters(url: str) -> dict[str, float]:
    """Return the numbers of /metrics that the method counts, by name."""
    lines = [line.split() for line in httpx.get(f"{url}/metrics").text.splitlines()]
    return {line[0]: float(line[1]) for line in lines if line[0].startswith("tandem_alternate")}


def deployment() -> Deployment:
    return Deployment.model_validate(
        {
            "model": {"path": str(REFERENCE)},
            "gpu": {"device": "cpu", "dtype": "float32", "kv_cache_gib": 0.2, "threads": 1, "check_coverage": True},
            "host": HOST,
            "profiles": PROFILES,
            "scheduler": {"default_profile": "half", "max_running": 2, "max_context_tokens": 1024},
        }
    )


@pytest.mark.usefixtures("added")
def test_a_methods_folder_is_on_the_configuration_page_and_its_price_in_the_plan() -> None:
    assert "alternate" in list_methods()
    assert "### `alternate`" in write_page()
    machine, page = load_machine(LAPTOP), io.StringIO()
    plan = resolve_plan(deployment(), machine)
    assert set(plan.memory.num_rings.values()) == {2}, "as many as may run: they take no memory"
    rates = find_rates(machine, measured_path())
    assert rates is not None
    found = compare_placements(plan.deployment, plan, rates)
    print_comparison(found, Console(width=200, file=page))
    assert "every second block (taken)" in page.getvalue()
    whole, half = found.get("offloaded").first, found.get("alternate").first
    assert half.host_ms == pytest.approx(whole.host_ms / 2)


@pytest.mark.usefixtures("added")
def test_a_profile_that_a_method_declares_is_there_where_it_is_the_default() -> None:
    composition = add_by_name({}, "sparse")["sparse"]
    assert (composition.prefill.method, composition.host.method) == ("momo", "alternate")
    assert add_by_name({}, "exact") == {}
    assert "as `sparse: {prefill: momo, host: alternate}`; known: exact" in why_unknown("sparse", ["exact"])


def test_the_candidate_for_the_default_profile_is_the_one_that_says_so(
    added: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    methods = list_methods()
    for method in methods.values():
        monkeypatch.setattr(type(method), "is_default_if_faster", method.name == "alternate")
    tree = deployment().model_dump() | {"gpu": {"device": "cuda"}, "profiles": {}, "scheduler": {}}
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(LAPTOP.with_name("a100-80g.json")))
    assert any(note.startswith("scheduler.default_profile: exact, not alternate: ") for note in plan.notes)
    assert whole_readers() == ["exact", "offloaded"]
    monkeypatch.setattr(type(methods["alternate"]), "is_default_if_faster", False)
    plan = resolve_plan(Deployment.model_validate(tree), load_machine(LAPTOP.with_name("a100-80g.json")))
    assert not any(note.startswith("scheduler.default_profile") for note in plan.notes)


@pytest.mark.usefixtures("added")
def test_a_methods_counters_say_what_it_left_out_and_reach_the_evaluations() -> None:
    plan = resolve_plan(deployment(), load_machine(LAPTOP))
    config = EngineConfig.model_validate(plan.deployment.model_dump(include=set(EngineConfig.model_fields)))
    engine, _ = load_engine(config, plan.memory, lambda *_: None)
    with ServingEngine(engine, plan.architecture, plan.profiles, 4, {}) as serving:
        before = serving.reads()
        prompt = np.random.default_rng(1).integers(10, 400, 700).tolist()
        (answer,) = serving.answer([DecodeRequest("one", prompt, 8, [], None)], "half")
        assert answer.failure is None
        fractions = serving.fractions(before, "half")
        assert fractions.shares["alternate_skipped"] == pytest.approx(0.5, abs=0.05)
        assert fractions.head_handled < 0.9
        assert serving.did_apply(before, "half", len(prompt))
        untouched = serving.reads()
        list(serving.answer([DecodeRequest("two", prompt, 8, [], None)], "offloaded"))
        assert (serving.reads() - untouched).methods["alternate_blocks"] == [0]


def test_a_methods_folder_is_served_and_its_counter_is_on_the_metrics_page(added: Path) -> None:
    process, url = serve(added, {"host": HOST, "profiles": PROFILES})
    try:
        body = {"prompt": [7 + i % 400 for i in range(900)], "max_tokens": 8, "attention_profile": "half"}
        answer = httpx.post(f"{url}/v1/completions", json=body, timeout=120)
        usage = answer.json()["usage"]
        assert usage["completion_tokens"] == 8, answer.text
        told = read_counters(url)
        skipped = usage["completion_tokens_details"]["skipped_blocks"]
        assert skipped == told["tandem_alternate_told_blocks_total"] > 0
        whole = httpx.post(f"{url}/v1/completions", json=body | {"attention_profile": "offloaded"}, timeout=120)
        assert "skipped_blocks" not in whole.json()["usage"]["completion_tokens_details"], "the method did not run"
        until = time.monotonic() + 20  # the engine tells its counts four times a second
        while not (told := read_counters(url))["tandem_alternate_blocks_total"] and time.monotonic() < until:
            time.sleep(0.1)
        assert 0 < told["tandem_alternate_skipped_blocks_total"] < told["tandem_alternate_blocks_total"]
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
