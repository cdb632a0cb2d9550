"""Which profile requests get that name none: where it pays the one that holds, and the plan says why."""

from pathlib import Path
from typing import Any

import pytest

from gpu.methods.indexed.crossovers import WHAT, identify
from gpu.methods.method import Where
from gpu.profiles import why_unknown
from server.deployment import Deployment
from server.planning.deployment_plan import resolve_plan
from server.planning.placements import compare_placements
from server.planning.resolved_plan import ResolvedPlan
from tests.server.test_placements import NOWHERE, ROUND
from transfer.machine import load_machine
from transfer.machine_rates import find_rates
from transfer.measured import keep_measured, measured_path

DEPLOY = Path(__file__).parents[2] / "deploy"


def plan(tree: dict[str, Any], machine: str = "a100-80g") -> ResolvedPlan:
    profile = load_machine(DEPLOY / "machines" / f"{machine}.json")
    profile = profile.model_copy(update={"rates": ROUND, "rates_from": "a test"})
    return resolve_plan(Deployment.model_validate(tree), profile)


def long(model: str = "llama-3.1-8b", gib: float = 24, context: int = 98_304, **more: Any) -> dict[str, Any]:
    return {
        "model": {"random_weights": model},
        "gpu": {"device": "cuda", "memory_limit_gib": gib},
        "host": {"memory_limit_gib": 100, "resident_tokens": 1024, "dense_layers": []},
        "scheduler": {"max_running": 8, "max_context_tokens": context},
        **more,
    }


def note(found: ResolvedPlan) -> str:
    return next(one for one in found.notes if one.startswith("scheduler.default_profile: "))


def test_a_context_that_the_card_does_not_hold_is_read_by_an_index_which_is_planned_and_priced() -> None:
    found = plan(long())
    assert found.deployment.default_profile == "indexed"
    said = note(found)
    assert "ms a token at 98,304 tokens; " in said
    assert "device and host, exact, which reads every token" in said
    items = {item.name: item.bytes for item in found.memory.items}
    assert items["pages of indexed"] >= 96 * 28e6
    assert items["rings of indexed"] > 0
    compared = compare_placements(found.deployment, found, find_rates(found.machine, NOWHERE))
    assert compared.taken == "indexed"
    assert f"{compared.get('indexed').first.ms:,.1f} ms a token" in said
    again = resolve_plan(found.deployment, found.machine)
    assert again.deployment == found.deployment


def test_what_the_card_holds_is_read_in_full_and_the_plan_says_what_an_index_would_take() -> None:
    found = plan(long(gib=76))
    assert found.deployment.default_profile == "exact"
    assert note(found).startswith("scheduler.default_profile: exact, not indexed: ")
    assert note(found).endswith("it would not be faster")
    assert not any("indexed" in item.name for item in found.memory.items)


def test_where_there_is_no_room_for_an_index_the_plan_says_so() -> None:
    found = plan(long(gib=18.8, context=65_536))
    assert found.deployment.default_profile == "offloaded"
    assert "offloaded, not indexed: 65,536 tokens with an index: gpu.memory_limit_gib" in note(found)
    assert note(found).endswith("; exact: no context of 65,536 tokens fits the card")


def test_an_index_that_is_the_default_keeps_no_layer_whole_unless_the_deployment_names_some() -> None:
    """It was judged and timed so. `offloaded` and `sampled`, which requests may name, keep two where one is default."""
    unset, named = long(), long()
    del unset["host"]["dense_layers"]
    named["host"]["dense_layers"] = [0, 16]
    found = plan(unset)
    assert (found.deployment.default_profile, found.memory.dense_layers) == ("indexed", ())
    assert "No layer stays whole on the device, for any profile, unless host.dense_layers names it" in note(found)
    assert found.memory == plan(long()).memory
    assert "No layer stays whole" not in note(plan(long()))
    assert plan(named).memory.dense_layers == (0, 16)
    unset["scheduler"]["default_profile"] = "indexed"
    assert plan(unset).memory.dense_layers == ()
    unset["scheduler"]["default_profile"] = "offloaded"
    assert plan(unset).memory.dense_layers == (0, 16)


def test_nothing_is_chosen_without_a_host_section_on_the_cpu_or_where_one_is_named() -> None:
    bare = long(gib=76)
    del bare["host"]
    cpu = long("smollm2-135m", context=8192)
    cpu["gpu"] = {"device": "cpu"}
    cpu["host"] = {"memory_limit_gib": 2}
    named = long()
    named["scheduler"]["default_profile"] = "offloaded"
    for tree, name in ((bare, "exact"), (cpu, "exact"), (named, "offloaded")):
        found = plan(tree)
        assert found.deployment.default_profile == name
        assert not [one for one in found.notes if one.startswith("scheduler.default_profile")]


def test_the_default_may_be_named_without_a_profile_and_a_profile_of_that_name_has_its_own_settings() -> None:
    tree = long()
    tree["scheduler"]["default_profile"] = "indexed"
    (part,) = plan(tree).profiles["indexed"].parts
    assert (part.settings.budget_share, part.settings.rings) == (0.02, None)
    tree["profiles"] = {"indexed": {"host": {"method": "indexed", "budget_share": 0.01, "rings": 1}}}
    found = plan(tree)
    (part,) = found.profiles["indexed"].parts
    assert part.settings.budget_share == 0.01
    assert set(found.memory.num_rings.values()) == {1}


def test_a_profile_that_reuses_over_an_index_is_planned_with_rings_of_both() -> None:
    found = plan(long(gib=40, profiles={"both": {"reuse": "mac", "host": {"method": "indexed", "rings": 2}}}))
    items = {item.name: item.bytes for item in found.memory.items}
    one = 32 * 32 * 1024 * (256 + 256 + 13)
    mac = next(count for part, count in found.memory.num_rings.items() if part.method == "mac")
    assert items["rings of mac"] == mac * one > 0
    assert items["pages of indexed"] >= 96 * 28e6
    assert items["rings of indexed"] > 0
    assert found.memory.own_windows["both"] >= 1280, "so that a hit asks the index for nothing"


def test_a_request_for_it_where_none_is_planned_is_told_how_to_plan_one() -> None:
    assert why_unknown("indexed", ["exact"]).startswith("'indexed' plans memory for its sequences; name a profile")


def test_a_profile_with_resident_auto_is_told_what_an_engine_measured_there(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tree = long(gib=76, profiles={"own": {"host": {"method": "indexed", "resident": "auto", "rings": 4}}})

    def told() -> str:
        return next(one for one in plan(tree).notes if one.startswith("profile own, resident: auto: "))

    assert "no engine has measured here yet" in told()
    found = plan(tree)
    settings = found.profiles["own"].host_part.settings
    assert found.machine.gpu is not None
    of = identify(Where(found.machine.gpu.name, "bfloat16", 32, found.architecture), settings)
    keep_measured(measured_path(), WHAT, of, {"1": None, "2": 70_000, "4": 52_000})
    said = "never in a step of 1, from 70,000 tokens each in a step of 2, from 52,000 tokens each in a step of 4, as an"
    assert said in told()
    keep_measured(measured_path(), WHAT, of, {"1": None})
    assert "contexts on the card are read in full, as an engine measured here" in told()
    planned = {item.name: item.bytes for item in found.memory.items}
    tree["profiles"]["own"]["host"]["resident"] = "indexed"
    assert planned == {item.name: item.bytes for item in plan(tree).memory.items}, "there is memory for either way"
