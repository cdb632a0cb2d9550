"""The command line: commands do what they say, and the world's errors are one line and status 1."""

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml
from safetensors.torch import load_file, save_file

from gpu.config import ModelConfig
from gpu.model.architecture import ModelError
from gpu.model.humming_formats import VERSION
from gpu.profiles import ProfileError
from gpu.weights.tensor_check import check_model
from server.commands.address import override_address, require_free_port
from server.commands.servable import require_servable
from server.commands.tandem import app, load_groups, main
from server.deployment import ConfigError, Deployment, load_deployment
from tests.gpu.humming_library import found_version
from transfer.machine import load_machine

DEPLOY = Path(__file__).parents[2] / "deploy"
TANDEM = (sys.executable, "-m", "server.commands")


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


RunTandem = Callable[..., Ended]


@pytest.fixture
def tandem(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> RunTandem:
    """Run the program in this process, with what it would start another one for: starting one takes seconds."""

    def run(*arguments: object) -> Ended:
        monkeypatch.setattr("server.commands.servable.require_tensors", check_model)
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        assert isinstance(ended.value.code, int)
        return Ended(ended.value.code, *capsys.readouterr())

    return run


def test_the_programs_help_names_every_command_and_group() -> None:
    done = subprocess.run([*TANDEM, "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert "Usage: tandem [OPTIONS]" in done.stdout
    for name in ("serve", "plan", "doctor", "chat", "bench", "eval"):
        assert name in done.stdout


def test_the_version_is_told(tandem: RunTandem) -> None:
    done = tandem("--version")
    assert (done.returncode, done.stdout) == (0, f"tandem {version('tandem')}\n")


@pytest.mark.parametrize(
    ("argument", "heavy"),
    [
        (
            "--version",
            ["torch", "numpy", "scipy", "pydantic", "httpx", "fastapi", "uvicorn", "tokenizers", "matplotlib"],
        ),
        ("--help", ["torch", "triton", "numba", "scipy", "transformers", "fastapi", "matplotlib"]),
    ],
)
def test_what_only_tells_of_the_program_imports_nothing_heavy(argument: str, heavy: list[str]) -> None:
    code = (
        "import atexit, sys; from server.commands.tandem import main; "
        f"atexit.register(lambda: print('loaded', [name for name in {heavy} if name in sys.modules])); main()"
    )
    done = subprocess.run([sys.executable, "-c", code, argument], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "loaded []"


def test_a_command_loads_the_group_that_it_is_of_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    def names(first: str) -> list[str | None]:
        monkeypatch.setattr(app, "registered_groups", [])
        load_groups(first)
        return [group.name for group in app.registered_groups]

    every = names("--help")
    assert {"documents", "bench", "eval", "tune"} <= set(every)
    assert [names(str(one)) for one in every] == [[one] for one in every]
    assert [names(one) for one in ("serve", "plan", "doctor", "chat", "--version")] == [[]] * 5
    assert names("bnech") == every


def test_a_models_folder_is_a_deployment_of_its_own(tandem: RunTandem) -> None:
    done = tandem("plan", DEPLOY / "models" / "reference", "--json")
    assert done.returncode == 0, done.stderr
    derived = json.loads(done.stdout)["deployment"]
    assert derived["model"]["name"] == "reference"
    assert derived["scheduler"]["max_context_tokens"] == 16384
    assert None not in (derived["gpu"]["device"], derived["gpu"]["kv_cache_gib"], derived["gpu"]["threads"])


def test_a_folders_whole_configuration_is_printed_as_a_file_that_serves_the_same(
    tmp_path: Path, tandem: RunTandem
) -> None:
    folder = DEPLOY / "models" / "reference"
    done = tandem("serve", folder, "--port", 8123, "--print-config")
    assert (done.returncode, done.stderr) == (0, "")
    printed = tmp_path / "derived.yaml"
    printed.write_text(done.stdout)
    derived = load_deployment(printed)
    assert (derived.model.path, derived.server.port) == (folder, 8123)
    assert derived.gpu.kv_cache_gib is not None
    assert tandem("serve", printed, "--print-config").stdout.splitlines()[1:] == done.stdout.splitlines()[1:]


def test_the_first_line_of_serve_waits_for_no_import() -> None:
    script = (
        "import sys; sys.modules['server.http.app'] = sys.modules['yaml'] = None; from server.commands import tandem; "
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{script} sys.argv = ['tandem', 'serve', 'some.yaml']; tandem.main()"],
        capture_output=True, text=True, cwd=DEPLOY.parent,
    )  # fmt: skip
    assert done.stdout == f"tandem {version('tandem')}: some.yaml\n"
    assert "some.yaml is missing" not in done.stderr, "it came no further"


def test_a_folder_that_is_no_model_is_one_line(tmp_path: Path, tandem: RunTandem) -> None:
    done = tandem("plan", tmp_path)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "has no config.json; wanted a YAML file or a model's Hugging Face folder" in done.stderr


def broken_deployments(folder: Path) -> Iterator[tuple[Deployment, str]]:
    """Return deployments that can be planned but not served, and words of the refusal."""
    reference = {"path": DEPLOY / "models" / "reference"}

    def made(tree: dict[str, object]) -> Deployment:
        return Deployment.model_validate({"gpu": {"device": "cpu"}} | tree)

    bare = folder / "bare"
    shutil.copytree(reference["path"], bare, ignore=shutil.ignore_patterns("*.safetensors"))
    yield made({"model": {"path": bare}}), "has neither model.safetensors nor model.safetensors.index.json"
    (bare / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')
    yield made({"model": {"path": bare}}), "model-1.safetensors is missing"
    template = folder / "template.jinja"
    template.write_text("{% if %}")
    yield made({"model": reference | {"chat_template": template}}), "does not compile"
    yield made({"model": {"random_weights": "tiny"}}), "model.tokenizer: missing"
    yield made({"model": reference, "server": {"api_keys_file": folder / "keys"}}), "server.api_keys_file"
    certificate = {"tls_certificate": folder / "none.pem"}
    yield made({"model": reference, "server": certificate}), "server.tls: one of"
    yield made({"model": reference, "scheduler": {"default_profile": "sampled"}}), "has no `host` section"
    yield made({"model": reference, "scheduler": {"default_profile": "psychic"}}), "scheduler.default_profile"
    host = {"memory_limit_gib": 0.1, "resident_tokens": 256}
    for name, composition, words in (
        ("x", {"host": "offloaded"}, "profiles.x.host: 'offloaded' keeps KV in host memory; this deployment has"),
        ("x", {"host": "exakt"}, "profiles.x.host: unknown method 'exakt'; the nearest known one is 'exact'"),
        ("x", {"prefill": "exact"}, "profiles.x.prefill: method 'exact' fills the slot `host`"),
        ("x", {"reuse": "mak"}, "profiles.x.reuse: unknown method 'mak'; the nearest known one is 'mac'"),
        ("exact", {}, "profiles.exact: is built in"),
    ):
        yield made({"model": reference, "profiles": {name: composition}}), words
    tables = {"host": {"method": "sampled", "num_tables": 20}}
    yield made({"model": reference, "host": host, "profiles": {"x": tables}}), "profiles.x.host: has {bits_per_table"


@pytest.mark.parametrize(("profiles", "words"), [
    ({"x": {"hots": "exact"}}, "profiles.x.hots: unknown key; the nearest known one is 'host'"),
    ({"x": "exact"}, "profiles.x: Value error, wanted a mapping of slots to methods, like `{host: sampled}`"),
    ({"x": {"host": 3}}, "profiles.x.host: Value error, wanted a method's name, or a mapping with `method`"),
    ({"x": {"host": {"bits_per_table": 3}}}, "profiles.x.host.method: Field required"),
    ({"a:b": {}}, "profiles.a:b.[key]: String should match pattern"),
])  # fmt: skip
def test_a_profile_of_another_form_is_refused_where_the_file_is_read(
    profiles: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text(yaml.safe_dump({"model": {"random_weights": "tiny"}, "profiles": profiles}))
    with pytest.raises(ConfigError) as refused:
        load_deployment(path)
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("text", "section"),
    [
        ("documents:", "documents"),
        ("host: # of this machine\nscheduler: {}", "host"),
        ("host:\n  sampled:\n    errors:", "host.sampled.errors"),
    ],
)
def test_a_section_with_nothing_behind_it_is_refused_by_name(text: str, section: str, tmp_path: Path) -> None:
    """Of YAML it is null; one that is written stands in every file that `tandem serve FOLDER` prints."""
    path = tmp_path / "tandem.yaml"
    path.write_text(f"model: {{random_weights: tiny}}\n{text}\n")
    with pytest.raises(ConfigError, match=rf": {section} has no value; write `{section.split('.')[-1]}: {{}}`"):
        load_deployment(path)
    path.write_text(f"model: {{random_weights: tiny}}\n{section.split('.')[0]}: null\n")
    deployment = load_deployment(path)
    assert (deployment.host, deployment.documents) == (None, None)


@pytest.mark.parametrize(
    ("profiles", "key", "wanted"),
    [
        ("\n  a:\n    reuse:", "profiles.a.reuse", "wanted a method's name, or a mapping with `method`"),
        ("{a: {host: exact, prefill: }}", "profiles.a.prefill", "wanted a method's name, or a mapping with `method`"),
        ("\n  a: {host: exact}\n  host:\n    host: # of it", "profiles.host.host", "wanted a method's name, or"),
        ("\n  host:", "profiles.host", "write `host: {}` for the profile"),
        ("", "profiles", "write `profiles: {}` for the section"),
    ],
)
def test_a_profile_or_slot_with_nothing_behind_it_is_refused_with_what_is_wanted(
    profiles: str, key: str, wanted: str, tmp_path: Path
) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text(f"model: {{random_weights: tiny}}\nprofiles: {profiles}\n")
    with pytest.raises(ConfigError, match=f": {re.escape(f'{key} has no value; {wanted}')}"):
        load_deployment(path)
    path.write_text("model: {random_weights: tiny}\nprofiles: {a: {reuse: null, prefill: ~}, b: {}}\n")
    for profile in load_deployment(path).profiles.values():
        assert (profile.reuse, profile.prefill, profile.host.method) == (None, None, "exact")


def test_plan_refuses_what_serve_refuses_with_the_same_words(tmp_path: Path, tandem: RunTandem) -> None:
    for number, (deployment, words) in enumerate(broken_deployments(tmp_path)):
        path = tmp_path / f"{number}.yaml"
        path.write_text(yaml.safe_dump(deployment.model_dump(mode="json", exclude_defaults=True)))
        planned, served = tandem("plan", path), tandem("serve", path, "--port", 0)
        assert (planned.returncode, served.returncode) == (1, 1), words
        assert words in planned.stderr
        assert planned.stderr == served.stderr


def test_plan_has_another_process_look_at_the_tensors(tmp_path: Path) -> None:
    """And tells what that one says, as loading would."""
    folder = tmp_path / "model"
    shutil.copytree(DEPLOY / "models" / "reference", folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][1:].clone()
    save_file(tensors, folder / "model.safetensors")
    done = subprocess.run([*TANDEM, "plan", folder], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    with pytest.raises(ModelError, match=r"tensor model\.norm\.weight is \[383\]; wanted \[384\]") as refused:
        check_model(ModelConfig(path=folder))
    assert done.stderr == f"error: {refused.value}\n"


def test_plan_and_serve_name_the_library_that_multiplies_where_it_is_not_installed(
    tmp_path: Path, tandem: RunTandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a card that is elsewhere nobody can say."""
    card, path = DEPLOY / "machines" / "rtx4090.json", tmp_path / "deployment.yaml"
    model = {"path": str(DEPLOY / "models" / "reference"), "weights": "int4", "products": "humming"}
    path.write_text(json.dumps({"model": model}))
    monkeypatch.setattr("transfer.machine.probe_machine", lambda: load_machine(card))
    monkeypatch.setattr("gpu.model.humming_formats.version", found_version("none"))
    planned, served = tandem("plan", path), tandem("serve", path, "--port", 0)
    assert (planned.returncode, served.returncode) == (1, 1)
    assert planned.stderr.startswith("error: model.products: asked humming, found none of humming-kernels; wanted ")
    assert planned.stderr == served.stderr
    assert tandem("plan", path, "--machine", card).returncode == 0
    monkeypatch.setattr("gpu.model.humming_formats.version", found_version(VERSION))
    assert tandem("plan", path).returncode == 0


def test_plan_prints_json_for_a_machine_that_is_elsewhere(tandem: RunTandem) -> None:
    machine = DEPLOY / "machines" / "a100-80g.json"
    done = tandem("plan", DEPLOY / "a100.yaml", "--machine", machine, "--json")
    assert done.returncode == 0, done.stderr
    tree = json.loads(done.stdout)
    assert tree["machine"]["name"] == "a100-80g"
    assert tree["memory"]["device"] == "cuda"
    assert {placement["name"] for placement in tree["placements"]["placements"]} >= {"device", "offloaded", "sampled"}
    assert tree["placements"]["rates"]["device_stream_gb_s"]["source"] == "profile"


def test_plan_prints_tables_for_this_machine(tandem: RunTandem) -> None:
    done = tandem("plan", DEPLOY / "reference.yaml")
    assert done.returncode == 0, done.stderr
    assert "KV pages" in done.stdout
    assert "max_context_tokens: 16384" in done.stdout
    assert "placements, ms a token of each context of 16,384 tokens" in done.stdout


def test_doctor_writes_a_profile_that_plan_reads(tmp_path: Path, tandem: RunTandem) -> None:
    path = tmp_path / "here.json"
    done = tandem("doctor", "--json", "--profile", path)
    tree = json.loads(done.stdout)
    assert tree["machine"] == json.loads(path.read_text())
    assert {finding["verdict"] for finding in tree["findings"]} <= {"good", "note", "bad"}
    assert load_machine(path).physical_cores >= 1
    assert tandem("plan", DEPLOY / "reference.yaml", "--machine", path).returncode == 0


def test_doctor_keeps_what_it_measures_for_plans_here_and_elsewhere(
    tmp_path: Path, tandem: RunTandem, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("server.commands.doctor.measure_rates", lambda: {"host_stream_gb_s": 12.5})
    path = tmp_path / "here.json"
    assert "host stream" in tandem("doctor", "--measure", "--profile", path).stdout
    assert load_machine(path).rates == {"host_stream_gb_s": 12.5}
    measured = {"rate": 12.5, "source": "measured"}
    here = json.loads(tandem("plan", DEPLOY / "reference.yaml", "--json").stdout)
    assert here["placements"]["rates"]["host_stream_gb_s"] == measured
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "elsewhere"))
    there = json.loads(tandem("plan", DEPLOY / "reference.yaml", "--machine", path, "--json").stdout)
    assert there["placements"]["rates"]["host_stream_gb_s"] == measured | {"source": "profile"}


BAD_CONFIGURATIONS = [
    (None, "is missing"),
    ("model: {path: nowhere}", "nowhere"),
    ("model: {random_weights: huge}", "unknown shape 'huge'"),
    ("model: {random_weights: tiny}\ngpu: {divice: cpu}", "gpu.divice: unknown key; the nearest known one is 'device'"),
    ("model: {random_weights: tiny}\nhost: {sampled: {bits: 9}}", "the nearest known one is 'bits_per_table'"),
    ("model: {random_weights: tiny}\ngpu: {memory_limit_gib: 0.001, device: cpu}", "gpu.memory_limit_gib"),
    (
        "model: {random_weights: tiny}\nserver: {prot: 1}",
        "server: unknown key at line 2; the nearest known one is 'port'",
    ),
    ("model: [", "is not YAML"),
    ("- 1", "holds list"),
]


def test_up_to_eight_faults_of_a_configuration_are_told_at_once(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    path.write_text("model: {random_weights: tiny, nane: m}\nserver: {prot: 1, port: -1}\ngpu: {page_tokens: 5}\n")
    with pytest.raises(ConfigError) as refused:
        load_deployment(path)
    for told in (
        "model.nane: unknown key; the nearest known one is 'name'; ", "nearest known one is 'port'",
        "server.port: Input should be greater than or equal to 0 (got -1); ", "; gpu.page_tokens: ",
    ):  # fmt: skip
        assert told in str(refused.value)
    assert " more" not in str(refused.value)
    path.write_text(f"model: {{random_weights: tiny}}\ngpu: {{{', '.join(f'unknown{i}: 1' for i in range(10))}}}\n")
    with pytest.raises(ConfigError, match=r"gpu\.unknown7: unknown key; and 2 more$") as refused:
        load_deployment(path)
    assert str(refused.value).count("unknown key") == 8


def test_a_file_that_a_profiles_method_names_must_be_there_to_serve(tmp_path: Path) -> None:
    predicted = {"method": "predicted", "weights": "nowhere.safetensors"}
    tree = {"model": {"path": str(DEPLOY / "models/reference")}, "host": {}, "profiles": {"x": {"host": predicted}}}
    path = tmp_path / "x.yaml"
    path.write_text(json.dumps(tree))
    words = f"profiles.x.host.weights: got {tmp_path / 'nowhere.safetensors'}; wanted a file"
    with pytest.raises(ProfileError) as refused:
        require_servable(load_deployment(path))
    assert str(refused.value) == words


def test_files_that_a_profiles_method_names_are_relative_to_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "tandem.yaml"
    blocks = "{method: predicted, weights: WEIGHTS, budget_tokens: 512}"
    profiles = f"  here: {{host: {blocks}}}\n  there: {{host: {blocks}}}\n  plain: {{host: sampled}}\n"
    profiles = profiles.replace("WEIGHTS", "own/p.safetensors", 1).replace("WEIGHTS", "/else/p.pth", 1)
    path.write_text(f"model: {{path: models/m}}\nhost: {{memory_limit_gib: 1}}\nprofiles:\n{profiles}")
    found = load_deployment(path).profiles
    assert found["here"].host.settings == {"weights": str(tmp_path / "own/p.safetensors"), "budget_tokens": 512}
    assert found["there"].host.settings["weights"] == "/else/p.pth"
    assert (found["plain"].host.method, found["plain"].host.settings) == ("sampled", {})


@pytest.mark.parametrize(
    ("command", "yaml", "words"),
    [*(("plan", *bad) for bad in BAD_CONFIGURATIONS), *(("serve", *bad) for bad in BAD_CONFIGURATIONS[:4])],
)
def test_what_is_wrong_with_a_configuration_is_one_line(
    tmp_path: Path, tandem: RunTandem, command: str, yaml: str | None, words: str
) -> None:
    path = tmp_path / "deployment.yaml"
    if yaml is not None:
        path.write_text(yaml)
    options = ["--port", "0"] if command == "serve" else []  # the default one may be taken, which is told first
    done = tandem(command, path, *options)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
    assert done.stderr.count("\n") == 1
    first = "" if command == "plan" else f"tandem {version('tandem')}: {path}"
    assert done.stdout.partition("\n")[0] == first
    assert "ready" not in done.stdout


def test_a_missing_machine_profile_is_one_line(tmp_path: Path, tandem: RunTandem) -> None:
    done = tandem("plan", DEPLOY / "reference.yaml", "--machine", tmp_path / "no.json")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "tandem doctor --profile" in done.stderr


def test_wrong_arguments_are_status_2(tandem: RunTandem) -> None:
    assert tandem("plan").returncode == 2
    assert tandem("serve", DEPLOY / "reference.yaml", "--port", "banana").returncode == 2


def test_a_taken_port_is_one_line_before_anything_is_loaded(tandem: RunTandem) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        done = tandem("serve", DEPLOY / "reference.yaml", "--port", port)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert f"127.0.0.1:{port}" in done.stderr


def test_a_model_that_can_be_planned_but_is_not_there_is_not_served(tmp_path: Path, tandem: RunTandem) -> None:
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


def test_a_host_that_does_not_exist_is_named_and_not_the_port() -> None:
    with pytest.raises(
        ConfigError, match=r"server\.host: 'nonsense\.invalid' is not an address of this machine"
    ) as refused:
        require_free_port("nonsense.invalid", 0)
    assert "Unknown error" not in str(refused.value)
    assert "--port" not in str(refused.value)


def test_options_override_the_file_and_nothing_else() -> None:
    deployment = Deployment.model_validate({"model": {"random_weights": "tiny"}, "server": {"port": 1, "host": "a"}})
    changed = override_address(deployment, None, 2)
    assert (changed.server.host, changed.server.port) == ("a", 2)
    assert override_address(deployment, "b", None).server.host == "b"
    assert deployment.server.port == 1
