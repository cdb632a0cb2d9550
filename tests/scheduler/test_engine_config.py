"""What the engine process is told is the deployment without its server, and the plan that was made of it."""

import logging
from pathlib import Path

import pytest

from gpu.config import DraftConfig
from scheduler.engine import engine_loop
from scheduler.engine_config import EngineConfig
from server.deployment import Deployment
from server.engine.prometheus import Metrics
from server.engine.supervisor import Supervisor
from server.planning.deployment_plan import resolve_plan
from transfer.machine import load_machine

LAPTOP = load_machine(Path(__file__).parents[2] / "deploy" / "machines" / "laptop.json")


def test_the_engine_is_told_all_of_a_deployment_but_its_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_loop, "_OUR_LOGGERS", ("a test",))  # other tests read the log of this process
    deployment = Deployment.model_validate({
        "model": {"random_weights": "tiny"},
        "gpu": {"page_tokens": 32},
        "host": {"rows": "int8", "sampled": {"bits_per_table": 9}},
        "profiles": {"careful": {"host": {"method": "sampled", "bits_per_table": 9}}, "plain": {}},
        "scheduler": {"max_running": 3, "default_profile": "careful"},
        "server": {"log_level": "error", "api_keys": ["sk-secret"]},
    })  # fmt: skip
    memory = resolve_plan(deployment, LAPTOP).memory
    start = Supervisor(deployment, memory, [], Metrics(), lambda _: None)._start_json
    assert b"sk-secret" not in start
    told = engine_loop._read_start(start.decode())
    assert logging.getLogger("a test").level == logging.ERROR
    assert (told.memory, told.log_level) == (memory, "error")
    assert {key: getattr(told.config, key) for key in EngineConfig.model_fields} == {
        key: getattr(deployment, key) for key in Deployment.model_fields if key not in ("server", "idle_seconds")
    }


@pytest.mark.parametrize(
    "given",
    ["ngram", {"profile": "indexed"}, {"model": "/m", "cache_tokens": 128}, {"source": "ngram", "most_tokens": 3}],
)
def test_a_source_of_drafts_reaches_the_engine_as_it_was_given(given: object) -> None:
    asked = DraftConfig.model_validate(given)
    assert DraftConfig.model_validate_json(asked.model_dump_json()) == asked
