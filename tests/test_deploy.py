"""What is shipped for machines: container, compose, Kubernetes and dashboards name things that exist."""

import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from server.deployment import Deployment, load_deployment
from server.engine.prometheus import Metrics
from server.several_models import load_deployments

ROOT = Path(__file__).resolve().parents[1]
DEPLOY = ROOT / "deploy"
METRIC = re.compile(r"tandem_[a-z_]+")
CONFIGS = ("laptop", "reference", "rtx4090", "rtx4090-32b", "rtx4090-30b-a3b", "a100", "gpt-oss-20b-16g",
           "gpt-oss-20b-24g", "gpt-oss-120b", "gemma-4-26b-a4b-24g", "glm-4.7-flash-24g", "qwen3.5-27b-24g",
           "qwen3.5-35b-a3b-24g", "nemotron-3-nano-30b-a3b-24g", "soak", "three-models-24g")  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_a_shipped_configuration_is_valid(name: str) -> None:
    for deployment in load_deployments(DEPLOY / f"{name}.yaml"):
        assert deployment.server.host == "127.0.0.1", "a shipped configuration is open to its own machine alone"


def test_every_shipped_configuration_is_looked_at() -> None:
    trees = {path.stem: next(yaml.safe_load_all(path.read_text())) for path in DEPLOY.glob("*.yaml")}
    found = {name for name, tree in trees.items() if {"model", "models"} & tree.keys()}
    assert found == set(CONFIGS)


def test_the_reference_configuration_carries_its_model() -> None:
    path = load_deployment(DEPLOY / "reference.yaml").model.path
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {item.name for item in path.iterdir()}


@pytest.fixture(scope="module")
def served_names() -> set[str]:
    """Return the names of all samples that a server has before its engine has told of methods."""
    names = set()
    for family in text_string_to_metric_families(Metrics().text().decode()):
        suffixes = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}.get(family.type, ("",))
        names |= {family.name + suffix for suffix in suffixes}
    return names


def test_the_dashboard_asks_for_metrics_that_the_server_has(served_names: set[str]) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "tandem.json").read_text())
    targets = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for expression in targets for name in METRIC.findall(expression)}
    assert asked <= served_names
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def test_alerts_watch_metrics_that_the_server_has_and_each_has_a_test(served_names: set[str]) -> None:
    groups = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    recorded = {rule["record"] for rule in rules if "record" in rule}
    asked = {name for rule in rules for name in METRIC.findall(rule["expr"])}
    assert asked <= served_names
    used = {name for rule in rules for name in re.findall(r"tandem:[a-z0-9_:]+", rule["expr"])}
    assert used <= recorded
    tests = yaml.safe_load((ROOT / "tests" / "alerts.yaml").read_text())["tests"][0]["promql_expr_test"]
    fired = {one["labels"] for one in tests[0]["exp_samples"]}
    assert fired == {f'{{alertname="{rule["alert"]}"}}' for rule in rules if "alert" in rule}
    assert yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())["rule_files"] == ["alerts.yaml"]


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus")
@pytest.mark.parametrize(
    "words",
    [("check", "config", "deploy/prometheus.yaml"), ("check", "rules", "deploy/alerts.yaml"),
     ("test", "rules", "tests/alerts.yaml")],
    ids=" ".join,
)  # fmt: skip
def test_promtool_passes_the_configuration_and_each_alert_fires_where_it_should(words: tuple[str, ...]) -> None:
    checked = subprocess.run(["promtool", *words], cwd=ROOT, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr


def read_compose() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def test_compose_mounts_files_that_exist() -> None:
    for service in read_compose()["services"].values():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            assert not source.startswith("./") or (DEPLOY / source).exists(), source


def test_compose_serves_a_configuration_that_exists_and_mounts_its_model() -> None:
    service = read_compose()["services"]["tandem"]
    config = next(Path(word) for word in service["command"] if word.endswith(".yaml"))
    model = load_deployment(DEPLOY / config.name).model.path
    wanted = f"/deploy/{model.relative_to(DEPLOY)}"
    assert any(f":{wanted}:" in volume for volume in service["volumes"])


def test_prometheus_scrapes_the_service_of_compose() -> None:
    tree = yaml.safe_load((DEPLOY / "prometheus.yaml").read_text())
    targets = tree["scrape_configs"][0]["static_configs"][0]["targets"]
    assert {target.split(":")[0] for target in targets} <= set(read_compose()["services"])


def test_the_chart_holds_a_valid_configuration_and_scales_by_a_gauge_that_the_server_has() -> None:
    chart = DEPLOY / "helm" / "tandem"
    Deployment.model_validate(yaml.safe_load((chart / "values.yaml").read_text())["deployment"])
    asked = set(METRIC.findall((chart / "templates" / "autoscaler.yaml").read_text()))
    assert asked == {"tandem_requests_waiting"}
    assert "# TYPE tandem_requests_waiting gauge" in Metrics().text().decode()


def test_the_image_copies_every_package_and_nothing_that_is_missing() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    copied = {word for line in re.findall(r"^COPY ([^-].*)$", text, re.MULTILINE) for word in line.split()[:-1]}
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]
    assert {pattern.rstrip("*") for pattern in settings["include"]} <= copied
    assert not {"lab", "tests"} & copied
    assert all((ROOT / name).exists() for name in copied)
    assert "ARG EXTRA=cuda" in text


def test_a_change_of_code_installs_torch_as_little_as_a_change_of_the_project_file_does(tmp_path: Path) -> None:
    """Its layers lie in front of the code's, and depend on two lists of packages alone."""
    text = (DEPLOY / "Dockerfile").read_text()
    torch, others, code = (text.index(part) for part in ("-r /pins/torch.txt", "-r /pins/others.txt", "COPY server"))
    assert torch < others < code
    installing = text[text.rindex("FROM") : others]
    assert re.findall(r"^COPY (.*)$", installing, re.MULTILINE) == [
        "--from=pins /pins/torch.txt /pins/", "--from=pins /pins/others.txt /pins/",
    ]  # fmt: skip
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extra in ("cpu", "cuda"):
        command = [sys.executable, DEPLOY / "pins.py", ROOT / "pyproject.toml", extra, tmp_path / extra]
        subprocess.run(command, check=True)
        lists = [(tmp_path / extra / name).read_text().splitlines() for name in ("torch.txt", "others.txt")]
        wanted = [
            *project["dependencies"],
            *(one for key in (extra, "otel") for one in project["optional-dependencies"][key]),
        ]
        assert sorted(lists[0] + lists[1]) == sorted(wanted), "traces are had by settings alone"
        assert f"torch=={project_pin(project, 'torch')}" in lists[0]


def project_pin(project: dict[str, Any], name: str) -> str:
    return next(one.split("==")[1] for one in project["dependencies"] if one.startswith(f"{name}=="))


def test_the_image_takes_the_packages_that_have_no_wheel_as_the_makefile_does() -> None:
    files = ((ROOT / "Makefile").read_text(), (DEPLOY / "Dockerfile").read_text())
    made, image = (re.search(r"--only-binary :all: (?:\\\n *)?--no-binary (\S+)", text) for text in files)
    assert image is not None, "pip finds no wheel of jieba or rouge-score, so the image cannot be built"
    assert made.group(1) == image.group(1)


def test_a_python_that_fits_is_found_and_one_that_does_not_is_refused(tmp_path: Path) -> None:
    script = DEPLOY / "find-python.sh"
    found = subprocess.run([str(script)], capture_output=True, text=True)
    assert found.returncode == 0
    shim = tmp_path / "python3"
    shim.write_text("#!/bin/sh\nexit 127\n")
    shim.chmod(0o755)
    named = subprocess.run([str(script)], capture_output=True, text=True, env={"PATH": str(tmp_path), "PYTHON": ""})
    if named.returncode:
        assert "no Python 3.11 or 3.12" in named.stderr
    else:
        assert named.stdout.startswith("/usr/bin/python3.1"), "a shim that does not work is passed over"
