"""What the engine process reads of a deployment is what the server's process was told."""

from scheduler.config import EngineConfig
from scheduler.engine_process import _read_config
from server.config import Deployment


def test_the_engine_is_told_all_of_a_deployment_but_its_server() -> None:
    deployment = Deployment.model_validate({
        "model": {"random_weights": "tiny"},
        "gpu": {"page_tokens": 32},
        "host": {"rows": "int8", "sampled": {"bits_per_table": 9}},
        "profiles": {"careful": {"host": {"method": "sampled", "bits_per_table": 9}}, "plain": {}},
        "scheduler": {"max_running": 3, "default_profile": "careful"},
        "server": {"port": 0},
    })  # fmt: skip
    told = _read_config(deployment.model_dump_json())
    assert {key: getattr(told, key) for key in EngineConfig.model_fields} == {
        key: getattr(deployment, key) for key in Deployment.model_fields if key != "server"
    }
