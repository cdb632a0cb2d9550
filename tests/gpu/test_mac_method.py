"""What MAC says of itself: settings, memory, whose KV is whose, and when a layer stops matching."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from gpu.config import Composition, GpuConfig
from gpu.memory.counting import RING_SHARE
from gpu.memory.demand import PlanError
from gpu.memory.plan import MemoryPlan, MemoryRequest, PlannedSizes, plan_memory
from gpu.methods.kept import Kept
from gpu.methods.mac.break_even import PAUSE_WINDOWS, WINDOW_STEPS, BreakEven
from gpu.methods.mac.match import Count
from gpu.methods.mac.settings import MacSettings
from gpu.model.architecture import named_shape
from gpu.profiles import Profile, ProfileError, find_kept, list_states, resolve_profiles
from transfer.host_config import HostConfig
from transfer.machine import load_machine

SHAPE = named_shape("llama-3.1-8b")
MACHINES = Path(__file__).parents[2] / "deploy" / "machines"


def profiles_of(reuse: dict[str, Any], section: HostConfig | None = None, **slots: Any) -> dict[str, Profile]:
    composition = Composition.model_validate({"reuse": {"method": "mac", **reuse}, **slots})
    return resolve_profiles({"mac": composition}, section)


def plan_of(reuse: dict[str, Any], machine: str = "a100-80g", max_running: int = 8, **gpu: Any) -> MemoryPlan:
    profiles = profiles_of(reuse).values()
    return plan_memory(
        MemoryRequest(
            SHAPE,
            GpuConfig(**gpu),
            host=None,
            kept=None,
            states=list_states(profiles, SHAPE),
            sizes=PlannedSizes(max_running, 2048, None, None),
            machine=load_machine(MACHINES / f"{machine}.json"),
        )
    )


# --- settings ---------------------------------------------------------------------------------------------------------


def test_gap_and_seeds_are_the_whole_ring_unless_given() -> None:
    assert (MacSettings().most_gap, MacSettings().num_seeds) == (1024, 1024)
    assert (MacSettings(capacity=64).most_gap, MacSettings(capacity=64, seed_tokens=0).num_seeds) == (64, 0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"max_gap": 1025}, "max_gap is 1025; wanted no more than capacity"),
        ({"capacity": 64, "seed_tokens": 65}, "seed_tokens is 65; wanted no more than capacity"),
        ({"layer_tau": {3: 1.0}}, "layer_tau: layer 3 has 1.0; wanted"),
        ({"layer_tau": {-1: 0.5}}, "layer_tau: layer -1 has 0.5; wanted"),
        ({"tau": 1.0}, "less than 1"),
        ({"max_prefix_share": 0.0}, "greater than 0"),
        ({"max_prefix_share": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_that_cannot_be_are_refused_with_the_number(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        MacSettings(**given)


def test_a_layer_that_is_off_is_said_as_yaml_has_it() -> None:
    settings = MacSettings.model_validate({"layer_tau": {"1": False, "2": 0.7, "3": "off"}})
    assert settings.layers(named_shape("tiny")) == [0, 2]
    assert (settings.tau_of(2), settings.tau_of(0)) == (0.7, 0.45)


def test_layers_with_a_window_are_left_as_they_are() -> None:
    shape = named_shape("tiny-gemma3")
    assert shape.window_layers
    assert set(MacSettings().layers(shape)) == set(range(shape.num_layers)) - set(shape.window_layers)


def test_a_model_of_nothing_but_windows_is_refused_in_one_line() -> None:
    shape = replace(SHAPE, layer_pattern=(replace(SHAPE.layer_pattern[0], window_tokens=4096),))
    with pytest.raises(ProfileError, match=r"has no layer of llama-3\.1-8b to work in: each one has a window"):
        list_states(profiles_of({}).values(), shape)


CHANGES = [
    {"tau": 0.5}, {"max_prefix_share": 1.0}, {"capacity": 512}, {"band": 128}, {"sink_tokens": 8}, {"max_gap": 99},
    {"max_age": 99}, {"seed_tokens": 99}, {"summaries": "float32"}, {"min_context_tokens": 1}, {"layer_tau": {1: 0.7}},
    {"stops_matching": False}, {"min_gap": 9},
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: next(iter(change)))
def test_every_setting_that_decides_the_kv_is_in_its_key(change: dict[str, Any]) -> None:
    assert profiles_of(change)["mac"].kv_key != profiles_of({})["mac"].kv_key
    assert profiles_of({"rings": 3})["mac"].kv_key == profiles_of({})["mac"].kv_key
    assert {next(iter(one)) for one in CHANGES} == set(MacSettings.model_fields) - {"rings"}


def test_its_window_stays_on_the_device_so_that_a_hit_asks_the_host_for_nothing() -> None:
    host = HostConfig()
    profiles = profiles_of({"capacity": 512, "band": 128, "sink_tokens": 9}, host, host="sampled").values()
    assert find_kept(profiles, host, SHAPE) == Kept(9, 640, (0, 16))


def ring_bytes(reuse: dict[str, Any]) -> int:
    part = profiles_of(reuse)["mac"].ring_parts[0]
    return part.method.footprint(part.settings, SHAPE, 1).sequence_bytes


# --- memory -----------------------------------------------------------------------------------------------------------


def test_a_ring_of_the_default_takes_half_a_gigabyte_of_an_8b_model_and_float32_half_as_much_again() -> None:
    sizes = {}
    for summaries in ("bfloat16", "float32"):
        sizes[summaries] = ring_bytes({"summaries": summaries})
    entries = 32 * 32 * 1024
    assert sizes == {"bfloat16": entries * (256 + 256 + 13), "float32": entries * (256 + 512 + 13)}


def test_rings_are_planned_as_many_as_are_asked_for_or_an_eighth_of_what_is_left() -> None:
    asked = plan_of({"rings": 3})
    (part,) = asked.num_rings
    (item,) = [item for item in asked.items if item.name == "rings of mac"]
    assert (asked.num_rings[part], item.bytes) == (3, 3 * ring_bytes({"rings": 3}))
    assert part == profiles_of({"rings": 3})["mac"].ring_parts[0].id
    derived = plan_of({}, max_running=64)
    (count,) = derived.num_rings.values()
    taken = {item.name: item.bytes for item in derived.items}
    left = derived.limit_bytes["gpu"] - sum(
        num_bytes for name, num_bytes in taken.items()
        if name not in ("rings of mac", "KV pages", "gathered KV", "hidden states", "positions", "processes")
    )  # fmt: skip
    assert count == int(left * RING_SHARE / ring_bytes({})) > 3
    assert plan_of({}, max_running=2).num_rings[next(iter(derived.num_rings))] == 2, "no more than may run"
    assert derived.used_bytes("gpu") <= derived.limit_bytes["gpu"]


def test_a_card_of_24_gib_bears_the_default() -> None:
    plan = plan_of({}, "rtx4090", max_running=4)
    assert list(plan.num_rings.values()) == [1]
    assert plan.max_context_tokens > 8192


def test_rings_that_do_not_fit_are_refused_with_what_to_lower() -> None:
    with pytest.raises(PlanError, match="or a profile's `capacity` or `rings`"):
        plan_of({"rings": 8, "capacity": 8192}, "rtx4090")


# --- stopping ---------------------------------------------------------------------------------------------------------


def run_windows(even: BreakEven, windows: int, per_step: dict[Count, int]) -> list[list[int]]:
    """Which of two layers match after each window; layer 1 adds these counts in a step, while it matches."""
    flags = []
    for _ in range(windows):
        for _ in range(WINDOW_STEPS):
            for count, number in per_step.items():
                even.counts[1, count] += number * int(even.is_matching[1])
            even.end_step()
        flags.append(even.is_matching[:, 0].tolist())
    return flags


@pytest.mark.parametrize("is_asked", [False, True])
@pytest.mark.parametrize("pays", [False, True])
def test_a_layer_that_reads_more_than_it_saves_stops_and_tries_again(is_asked: bool, pays: bool) -> None:
    """Eight heads in groups of four, contexts of 1,000 cells, rows of 256 bytes: where all heads hit, 800 cells of each
    of two KV heads are spared, 409,600 bytes; looking costs eight heads 51,200 bytes each, or one byte more.
    """
    even = BreakEven(
        torch.tensor([False, is_asked]), row_bytes=256, try_bytes=51_200 + (not pays), group=4,
        stops=True,
    )  # fmt: skip
    flags = run_windows(
        even, PAUSE_WINDOWS + 2,
        {Count.TRIES: 8, Count.HITS: 8, Count.CELLS: 8000, Count.SKIPPED: 6400, Count.READ: 400},
    )  # fmt: skip
    assert [flag for flag, _ in flags] == [1] * len(flags), "a layer that tried nothing goes on"
    off = [[1, 0]] * PAUSE_WINDOWS
    assert flags == ([[1, 1]] * len(flags) if pays else [*off, [1, 1], [1, 0]])
    assert even.num_stops.tolist() == [0, 0 if pays else 2]


def test_on_the_device_a_kv_head_is_spared_where_all_its_heads_hit() -> None:
    """Three of four heads hit: the host is spared three quarters, the device nothing."""
    for is_asked, goes_on in ((True, 1), (False, 0)):
        even = BreakEven(torch.tensor([False, is_asked]), row_bytes=256, try_bytes=1000, group=4, stops=True)
        counts = {Count.TRIES: 8, Count.HITS: 6, Count.CELLS: 8000, Count.SKIPPED: 4800, Count.READ: 2000}
        assert run_windows(even, 1, counts) == [[1, goes_on]]


def test_matching_never_stops_where_it_is_told_not_to() -> None:
    even = BreakEven(torch.tensor([False, False]), 256, 10**9, 4, stops=False)
    assert run_windows(even, 2, {Count.TRIES: 8}) == [[1, 1]] * 2
