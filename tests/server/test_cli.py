"""The command line: commands do what they say, and the world's errors are one line and status 1."""

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from server.cli import main, override_address, require_free_port
from server.config import ConfigError, Deployment
from transfer.machine import load_machine

DEPLOY = Path(__file__).parents[2] / "deploy"
TANDEM = Path(sys.executable).with_name("tandem")


def tandem(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [str(TANDEM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL)


def test_help_names_every_command_and_group() -> None:
    done = tandem("--help")
    assert done.returncode == 0
    for name in ("serve", "plan", "doctor", "chat", "bench", "eval"):
        assert name in done.stdout


def test_plan_prints_json_for_a_machine_that_is_elsewhere() -> None:
    machine = DEPLOY / "machines" / "a100-80g.json"
    done = tandem("plan", DEPLOY / "a100.yaml", "--machine", machine, "--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert tree["machine"]["name"] == "a100-80g"
    assert tree["memory"]["device"] == "cuda"


def test_plan_prints_tables_for_this_machine() -> None:
    done = tandem("plan", DEPLOY / "laptop.yaml")
    assert done.returncode == 0, done.stderr
    assert "KV pages" in done.stdout
    assert "max_context_tokens: 16384" in done.stdout


def test_doctor_writes_a_profile_that_plan_reads(tmp_path: Path) -> None:
    path = tmp_path / "here.json"
    done = tandem("doctor", "--json", "--profile", path)
    tree = json.loads(done.stdout)
    assert tree["machine"] == json.loads(path.read_text())
    assert {finding["verdict"] for finding in tree["findings"]} <= {"good", "note", "bad"}
    assert load_machine(path).physical_cores >= 1
    assert tandem("plan", DEPLOY / "laptop.yaml", "--machine", path).returncode == 0


BAD_CONFIGURATIONS = [
    (None, "is missing"),
    ("model: {path: nowhere}", "nowhere"),
    ("model: {random_weights: huge}", "unknown shape 'huge'"),
    ("model: {random_weights: tiny}\ngpu: {divice: cpu}", "gpu.divice: unknown key"),
    ("model: {random_weights: tiny}\ngpu: {memory_limit_gib: 0.001, device: cpu}", "gpu.memory_limit_gib"),
    ("model: [", "is not YAML"),
    ("- 1", "holds list"),
]


@pytest.mark.parametrize(
    ("command", "yaml", "words"),
    [*(("plan", *bad) for bad in BAD_CONFIGURATIONS), *(("serve", *bad) for bad in BAD_CONFIGURATIONS[:4])],
)
def test_what_is_wrong_with_a_configuration_is_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    yaml: str | None,
    words: str,
) -> None:
    path = tmp_path / "deployment.yaml"
    if yaml is not None:
        path.write_text(yaml)
    options = ["--port", "0"] if command == "serve" else []  # the default one may be taken, which is told first
    monkeypatch.setattr(sys, "argv", ["tandem", command, str(path), *options])
    with pytest.raises(SystemExit) as ended:
        main()
    out, errors = capsys.readouterr()
    assert ended.value.code == 1
    assert errors.startswith("error: ")
    assert words in errors
    assert errors.count("\n") == 1
    assert out == ""


def test_a_missing_machine_profile_is_one_line(tmp_path: Path) -> None:
    done = tandem("plan", DEPLOY / "laptop.yaml", "--machine", tmp_path / "no.json")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "tandem doctor --profile" in done.stderr


def test_wrong_arguments_are_status_2() -> None:
    assert tandem("plan").returncode == 2
    assert tandem("serve", DEPLOY / "laptop.yaml", "--port", "banana").returncode == 2


def test_a_taken_port_is_one_line_before_anything_is_loaded() -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = tandem("serve", DEPLOY / "laptop.yaml", "--port", port)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_model_that_can_be_planned_but_is_not_there_is_not_served(tmp_path: Path) -> None:
    path = tmp_path / "deployment.yaml"
    path.write_text("model: {path: nowhere, shape: tiny}\ngpu: {device: cpu}\nserver: {port: 0}")
    assert tandem("plan", path).returncode == 0
    done = tandem("serve", path)
    assert done.returncode == 1
    assert "model.path" in done.stderr


def test_a_free_port_passes_and_an_impossible_host_does_not() -> None:
    require_free_port("127.0.0.1", 0)
    with pytest.raises(ConfigError, match=r"server\.port: cannot listen on 192\.0\.2\.1:0"):
        require_free_port("192.0.2.1", 0)


def test_options_override_the_file_and_nothing_else() -> None:
    deployment = Deployment.model_validate({"model": {"random_weights": "tiny"}, "server": {"port": 1, "host": "a"}})
    changed = override_address(deployment, None, 2)
    assert (changed.server.host, changed.server.port) == ("a", 2)
    assert override_address(deployment, "b", None).server.host == "b"
    assert deployment.server.port == 1
