"""The Helm chart, rendered by Helm and held against the schemas of Kubernetes: no cluster runs it here."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

from server.deployment import Deployment
from server.engine.prometheus import Metrics
from tests.fleet.environments import ROOT, program_of

CHART = ROOT / "deploy" / "helm" / "tandem"
Objects = dict[str, dict[str, Any]]
CASES: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "everything": {
        "autoscaling": {"enabled": True},
        "pool": {"enabled": True},
        "disk": {"size": "200Gi", "storageClassName": "fast"},
        "deployment": {"disk": {"limit_gib": 150}, "server": {"drain_seconds": 7.5}},
        "nodeSelector": {"gpu": "h100"},
        "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}],
        "runtimeClassName": "nvidia",
        "priorityClassName": "high",
    },
    "no keys": {"keysSecret": ""},
    "a model over two GPUs": {"gpus": 2, "disk": {"size": "20Gi"}},
}
WRONG: dict[str, dict[str, Any]] = {
    "an unknown value": {"replica": 3},
    "no image": {"image": ""},
    "a label that is a number": {"nodeSelector": {"gpus": 8}},
}
PORT = {"type": "integer", "minimum": 1, "maximum": 65535}
POOL = {  # of InferencePool v1, as its API reference has it
    "type": "object",
    "additionalProperties": False,
    "required": ["selector", "targetPorts", "endpointPickerRef"],
    "properties": {
        "selector": {
            "type": "object",
            "additionalProperties": False,
            "required": ["matchLabels"],
            "properties": {"matchLabels": {"type": "object", "additionalProperties": {"type": "string"}}},
        },
        "targetPorts": {
            "type": "array",
            "minItems": 1,
            "maxItems": 8,
            "items": {
                "type": "object",
                "additionalProperties": False,
                "required": ["number"],
                "properties": {"number": PORT},
            },
        },
        "appProtocol": {"enum": ["http", "kubernetes.io/h2c"]},
        "endpointPickerRef": {
            "type": "object",
            "additionalProperties": False,
            "required": ["name", "port"],
            "properties": {
                "group": {"type": "string"},
                "kind": {"type": "string"},
                "name": {"type": "string", "minLength": 1},
                "port": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["number"],
                    "properties": {"number": PORT},
                },
                "failureMode": {"enum": ["FailOpen", "FailClose"]},
            },
        },
    },
}


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Render every case and every wrong one in one call."""
    named = CASES | WRONG
    done = subprocess.run(
        [str(program_of("helm", "python")), str(Path(__file__).with_name("render_chart.py")), str(CHART)],
        input=json.dumps(list(named.values())),
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(done.stdout)
    return {"lint": found["lint"], **dict(zip(named, found["rendered"], strict=True))}


@pytest.fixture(params=CASES)
def objects(report: dict[str, Any], request: pytest.FixtureRequest) -> Objects:
    """Return a case's objects by kind, the Service without an address as `Pods`."""
    found = report[request.param]["objects"]
    assert found, report[request.param]
    return {"Pods" if item["spec"].get("clusterIP") == "None" else item["kind"]: item for item in with_spec(found)}


def with_spec(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"spec": {}, **item} for item in found]


def pod_of(objects: Objects) -> dict[str, Any]:
    return objects["StatefulSet"]["spec"]["template"]


def file_of(objects: Objects) -> Deployment:
    return Deployment.model_validate(yaml.safe_load(objects["ConfigMap"]["data"]["deployment.yaml"]))


def test_helm_has_no_complaint_of_the_chart(report: dict[str, Any]) -> None:
    assert report["lint"] == []


@pytest.mark.parametrize("case", CASES)
def test_every_object_fits_the_schemas_of_kubernetes(report: dict[str, Any], case: str) -> None:
    assert report[case]["faults"] == []
    kinds = sorted(item["kind"] for item in report[case]["objects"])
    extra = ["HorizontalPodAutoscaler", "InferencePool"] if case == "everything" else []
    assert kinds == sorted(["ConfigMap", "PodDisruptionBudget", "Service", "Service", "StatefulSet", *extra])


def test_what_is_wrong_is_told(report: dict[str, Any]) -> None:
    assert "additional properties 'replica' not allowed" in report["an unknown value"]["error"]
    assert "/image" in report["no image"]["error"]
    assert "nodeSelector.gpus: 8 is not of type" in report["a label that is a number"]["faults"][0]


def test_the_server_file_is_valid_and_the_server_is_where_the_pod_says(objects: Objects) -> None:
    file, pod = file_of(objects), pod_of(objects)
    container = pod["spec"]["containers"][0]
    assert file.server.host == "0.0.0.0"
    assert container["ports"] == [{"name": "http", "containerPort": file.server.port}]
    assert container["args"] == ["serve", "/config/deployment.yaml"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    claims = [claim["metadata"]["name"] for claim in objects["StatefulSet"]["spec"].get("volumeClaimTemplates", [])]
    assert mounts.keys() == {volume["name"] for volume in pod["spec"]["volumes"]} | set(claims)
    assert str(file.model.path).startswith(mounts["model"])
    assert file.server.api_keys_file == (Path(mounts["keys"]) / "keys" if "keys" in mounts else None)
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == file.gpu.devices, "a GPU that is asked for is used"
    assert ("/dev/shm" in mounts.values()) == (gpus > 1)
    if claims and gpus == 1:
        assert file.disk is not None
        assert str(file.disk.folder).startswith(mounts[claims[0]]), "contexts outlive the pod"
    else:
        assert file.disk is None, "a model that is split keeps none on disk"


def test_a_pod_has_the_time_that_its_drain_takes(objects: Objects) -> None:
    pod = pod_of(objects)["spec"]
    stop = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
    assert stop[0] == "sleep"
    needed = int(stop[1]) + file_of(objects).server.drain_seconds
    assert pod["terminationGracePeriodSeconds"] > needed + 10, "the engine's end takes some seconds more"


def test_a_pod_is_asked_what_it_can_answer(objects: Objects) -> None:
    container = pod_of(objects)["spec"]["containers"][0]
    paths = {name: container[f"{name}Probe"]["httpGet"]["path"] for name in ("startup", "readiness", "liveness")}
    assert paths == {"startup": "/health", "readiness": "/health", "liveness": "/live"}


def test_a_pod_has_no_rights_and_writes_to_its_volumes_alone(objects: Objects) -> None:
    pod = pod_of(objects)["spec"]
    container = pod["containers"][0]
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["runAsUser"] > 0
    assert not pod["automountServiceAccountToken"]
    own = container["securityContext"]
    assert own["readOnlyRootFilesystem"]
    assert not own["allowPrivilegeEscalation"]
    assert own["capabilities"] == {"drop": ["ALL"]}
    writable = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
    assert writable - {"/dev/shm"} == {"/cache", "/tmp"}
    image = (ROOT / "deploy" / "Dockerfile").read_text()
    assert set(re.findall(r"CACHE_DIR=(/\w+)/", image)) == {"/cache"}


def test_whatever_chooses_pods_chooses_these(objects: Objects) -> None:
    labels = pod_of(objects)["metadata"]["labels"]
    spec = objects["StatefulSet"]["spec"]
    chosen = [spec["selector"]["matchLabels"], objects["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"]]
    chosen += [objects[name]["spec"]["selector"] for name in ("Service", "Pods")]
    if "InferencePool" in objects:
        pool = objects["InferencePool"]["spec"]
        Draft202012Validator(POOL).validate(pool)
        assert pool["targetPorts"] == [{"number": file_of(objects).server.port}]
        chosen.append(pool["selector"]["matchLabels"])
    assert all(one == labels for one in chosen)
    assert spec["serviceName"] == objects["Pods"]["metadata"]["name"]


def test_what_scales_asks_for_a_gauge_of_the_server_and_alone_sets_the_count(objects: Objects) -> None:
    is_fixed = "replicas" in objects["StatefulSet"]["spec"]
    if "HorizontalPodAutoscaler" not in objects:
        assert is_fixed
        return
    assert not is_fixed, "an upgrade would set the count back"
    spec = objects["HorizontalPodAutoscaler"]["spec"]
    assert f"# TYPE {spec['metrics'][0]['pods']['metric']['name']} gauge" in Metrics().text().decode()
    target = objects["StatefulSet"]
    wanted = {"apiVersion": target["apiVersion"], "kind": target["kind"], "name": target["metadata"]["name"]}
    assert spec["scaleTargetRef"] == wanted
