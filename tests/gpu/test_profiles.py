"""Profiles belong to a deployment, refuse unknown names with a list, and need no torch to be listed."""

import subprocess
import sys
from dataclasses import replace

import pytest

from gpu.profiles import PROFILES, ProfileError, get_profile, profiles_for, register
from transfer.config import DEVICE_PROFILES, HOST_PROFILES, HostConfig, SampledConfig

HOST = HostConfig()


def test_exact_ships_with_and_without_a_host_tier() -> None:
    for host in (None, HOST):
        profile = get_profile("exact", host)
        assert (profile.name, profile.uses_host, profile.samples) == ("exact", False, False)
        assert callable(profile.load_decode_attention())


def test_the_names_that_a_plan_knows_are_those_that_there_are() -> None:
    assert tuple(PROFILES) == DEVICE_PROFILES
    assert set(profiles_for(HostConfig())) == {*DEVICE_PROFILES, *HOST_PROFILES}


def test_a_host_section_brings_a_sampled_and_an_offloaded_profile() -> None:
    assert list(profiles_for(None)) == ["exact"]
    assert list(profiles_for(HOST)) == ["exact", "sampled", "offloaded"]
    assert [(get_profile(name, HOST).uses_host, get_profile(name, HOST).samples) for name in HOST_PROFILES] == [
        (True, True),
        (True, False),
    ]


def test_an_unknown_profile_is_refused_with_the_list() -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'exakt'; known: exact$"):
        get_profile("exakt", None)
    with pytest.raises(ProfileError, match=r"unknown profile 'exakt'; known: exact, sampled, offloaded"):
        get_profile("exakt", HOST)


@pytest.mark.parametrize("name", HOST_PROFILES)
def test_a_profile_of_the_host_tier_is_refused_where_there_is_none(name: str) -> None:
    wanted = f"attention_profile: '{name}' keeps KV in host memory; this deployment has no `host` section"
    with pytest.raises(ProfileError, match=wanted):
        get_profile(name, None)


@pytest.mark.parametrize("name", ["exact", "sampled"])
def test_a_name_is_registered_once(name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' is registered already"):
        register(replace(PROFILES["exact"], name=name))


def test_a_registered_profile_is_in_every_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpu.profiles.PROFILES", dict(PROFILES))
    register(replace(PROFILES["exact"], name="from outside"))
    assert "from outside" in profiles_for(None)
    assert get_profile("from outside", HOST).name == "from outside"


OTHER_HOSTS = [
    {"rows": "int8"},
    {"sink_tokens": 5},
    {"window_tokens": 65},
    {"dense_layers": ()},
    {"dense_layers": (0,)},
    {"resident_tokens": 1},
    {"sampled": SampledConfig(bits_per_table=9)},
    {"sampled": SampledConfig(num_tables=149)},
]


@pytest.mark.parametrize("change", OTHER_HOSTS, ids=lambda change: next(iter(change)))
def test_every_setting_that_decides_sampled_kv_is_in_its_key(change: dict) -> None:
    assert get_profile("sampled", HostConfig(**change)).kv_key != get_profile("sampled", HOST).kv_key


def test_where_the_kv_lies_and_how_many_threads_read_it_is_not_in_the_key() -> None:
    moved = HostConfig(memory_limit_gib=1, threads=3)
    assert [profile.kv_key for profile in profiles_for(moved).values()] == [
        profile.kv_key for profile in profiles_for(HOST).values()
    ]
    assert get_profile("exact", HOST).kv_key == get_profile("exact", None).kv_key
    assert len({profile.kv_key for profile in profiles_for(HOST).values()}) == 3


def test_listing_profiles_needs_no_torch() -> None:
    code = "import sys, gpu.profiles, gpu.step; gpu.profiles.profiles_for(None); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
