"""A file with several models: what each becomes, what is refused, and what the plan says of them together."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from server.commands.models_page import describe_models, print_together
from server.commands.named_models import open_deployments
from server.commands.plan_page import dump_deployments
from server.commands.tandem import app
from server.deployment import ConfigError, Deployment, load_deployment
from server.planning.deployment_plan import resolve_plan
from server.planning.side_by_side import Room, find_room
from server.several_models import check_together, load_deployments
from tests.server.live_server import LAPTOP, REFERENCE, ROOT
from transfer.machine import load_machine

RTX = ROOT / "deploy" / "machines" / "rtx4090.json"
TINY = {"path": str(REFERENCE)}


def write(path: Path, tree: dict[str, Any]) -> Path:
    file = path / "models.yaml"
    file.write_text(yaml.safe_dump(tree))
    return file


def tiny(name: str, **more: object) -> dict[str, Any]:
    return {"model": TINY | {"name": name}, **more}


def test_each_model_has_the_files_sections_but_for_what_it_says_itself(tmp_path: Path) -> None:
    tree = {
        "models": [
            tiny("a", gpu={"kv_cache_gib": 0.5}, profiles={"own": {"draft": "ngram"}}),
            {"model": {"path": "b", "aliases": ["x"]}, "idle_seconds": None, "adapters": {"style": "lora"}},
        ],
        "gpu": {"device": "cpu", "kv_cache_gib": 1.0},
        "idle_seconds": 60,
        "server": {"port": 8001, "models_at_once": "fitting"},
    }
    a, b = load_deployments(write(tmp_path, tree))
    assert (a.gpu.device, a.gpu.kv_cache_gib, b.gpu.kv_cache_gib) == ("cpu", 0.5, 1.0)
    assert (a.idle_seconds, b.idle_seconds) == (60, None)
    assert (list(a.profiles), list(b.profiles)) == (["own"], [])
    assert b.model.path == tmp_path / "b", "relative to the file"
    assert b.adapters == {"style": tmp_path / "lora"}
    assert a.server == b.server
    assert a.server.port == 8001
    again = yaml.safe_dump(dump_deployments([a, b]))
    (tmp_path / "again.yaml").write_text(again)
    assert load_deployments(tmp_path / "again.yaml") == (a, b)


def test_a_file_with_one_model_is_what_it_was(tmp_path: Path) -> None:
    path = write(tmp_path, tiny("a"))
    assert load_deployments(path) == (load_deployment(path),)
    assert dump_deployments(load_deployments(path))["model"]["name"] == "a"
    several = write(tmp_path, {"models": [tiny("a")]})
    with pytest.raises(ConfigError, match="has several `models`; wanted a file with one `model`"):
        load_deployment(several)


def test_what_no_server_could_have_is_refused_by_its_place(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for tree, told in (
        ({"models": []}, r"models: got an empty list, wanted a list of mappings with `model`"),
        ({"models": {"a": 1}}, r"models: got dict, wanted a list"),
        ({"models": ["a"]}, r"models\[0\]: got str, wanted a mapping"),
        ({"models": [tiny("a")], "model": TINY}, r"model: stands beside `models`; move it into one of them"),
        ({"models": [tiny("a")], "adapters": {"x": "y"}}, r"adapters: stands beside `models`"),
        ({"models": [tiny("a", server={"port": 1})]}, r"models\[0\]\.server: one is shared by all; move it to the top"),
        ({"models": [tiny("a"), tiny("b") | {"gpuu": {}}]}, r"models\[1\]\.\(top\): unknown key at line 5; .* 'gpu'"),
        ({"models": [tiny("a"), tiny("b", gpu={"kv": 3})]}, r"models\[1\]\.gpu\.kv: .*\(got 3\)"),
        ({"models": [tiny("a"), {"gpu": {}}]}, r"models\[1\]\.model: Field required"),
        ({"models": [tiny("a")], "server": {"models_at_once": "all"}}, r"server\.models_at_once"),
    ):
        with subtests.test(told=told), pytest.raises(ConfigError, match=told):
            load_deployments(write(tmp_path, tree))
    path = tmp_path / "empty.yaml"
    path.write_text(f"models:\n- model: {{path: {REFERENCE}}}\n  gpu:\n")
    with pytest.raises(ConfigError, match=r"models\[0\]\.gpu has no value; write `gpu: \{\}`"):
        load_deployments(path)


def test_names_and_folders_that_meet_are_told_before_anything_is_loaded(tmp_path: Path) -> None:
    one, two = tiny("a"), {"model": TINY | {"name": "b", "aliases": ["a"]}}
    with pytest.raises(ConfigError, match=r"models: a and b are both called 'a'; set `model\.name`"):
        open_deployments(write(tmp_path, {"models": [one, two]}), is_offline=True)
    with pytest.raises(ConfigError, match=r"models: a and a:x are both called 'a:x'; set `model\.name`"):
        open_deployments(write(tmp_path, {"models": [tiny("a", adapters={"x": "y"}), tiny("a:x")]}), is_offline=True)
    tree = {"models": [tiny("a"), tiny("b")], "disk": {"folder": "contexts"}, "server": {"models_at_once": "fitting"}}
    with pytest.raises(ConfigError, match=r"a and b have one disk\.folder, .*contexts, and may run at once"):
        open_deployments(write(tmp_path, tree), is_offline=True)
    del tree["server"]
    assert len(open_deployments(write(tmp_path, tree), is_offline=True)) == 2
    check_together([])


def test_a_plan_says_what_each_takes_and_which_fit_side_by_side(tmp_path: Path) -> None:
    machine = load_machine(RTX)
    sizes = {"large": 20, "small": 3, "middle": 8}
    tree = {
        "models": [
            {"model": {"random_weights": "smollm2-135m", "name": name}, "gpu": {"memory_limit_gib": gib}}
            for name, gib in sizes.items()
        ],
        "server": {"models_at_once": "fitting"},
    }
    plans = [resolve_plan(one, machine) for one in load_deployments(write(tmp_path, tree))]
    room = find_room(machine, is_shared=True)
    large, small, middle = (plan.memory for plan in plans)
    assert room.holds([large, small])
    assert not room.holds([large, middle])
    assert not Room(room.bytes, is_shared=False).holds([large, small])
    assert room.why_not([large, middle]) == "20.00 GiB + 8.00 GiB of GPU memory are more than 23.99 GiB"
    console = Console(width=160, record=True)
    print_together(plans, console)
    shown = console.export_text()
    assert "side by side fit large and small; small and middle" in shown
    told = describe_models(plans, [{}] * 3)["together"]
    assert [pair["why_not"] is None for pair in told["pairs"]] == [True, False, True]
    assert told["why_not"].startswith("20.00 GiB + 3.00 GiB + 8.00 GiB of GPU memory")


def test_the_command_plans_each_model_and_all_together(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "deploy" / "three-models-24g.yaml"

    def run_command(*words: str) -> str:
        app(["plan", str(path), "--machine", str(RTX), *words], standalone_mode=False)
        return capsys.readouterr().out

    words = " ".join(run_command().split())
    assert "one is loaded at a time (server.models_at_once: one); all do not fit side by side: 22.50 GiB + " in words
    tree = json.loads(run_command("--json"))
    assert [one["name"] for one in tree["models"]] == ["gpt-oss-20b", "qwen3.5-35b-a3b", "llama-3.1-8b"]
    assert all(one["memory"]["max_context_tokens"] == 131072 for one in tree["models"])


def test_small_models_fit_a_laptop_together() -> None:
    deployments = [Deployment.model_validate(tiny(name)) for name in "ab"]
    plans = [resolve_plan(one, load_machine(LAPTOP)) for one in deployments]
    console = Console(width=160, record=True)
    print_together(plans, console)
    assert "one is loaded at a time (server.models_at_once: one); all would fit side by side" in console.export_text()
