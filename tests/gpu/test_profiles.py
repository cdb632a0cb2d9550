"""Profiles are found by name, refuse unknown names with a list, and need no torch to be listed."""

import subprocess
import sys

import pytest

from gpu.profiles import PROFILES, ProfileError, get_profile, register


def test_exact_ships() -> None:
    assert get_profile("exact").name == "exact"
    assert callable(get_profile("exact").load_decode_attention())


def test_an_unknown_profile_is_refused_with_the_list() -> None:
    with pytest.raises(ProfileError, match=r"unknown profile 'exakt'; known: exact"):
        get_profile("exakt")


def test_a_name_is_registered_once() -> None:
    with pytest.raises(ValueError, match="'exact' is registered already"):
        register(PROFILES["exact"])


def test_listing_profiles_needs_no_torch() -> None:
    code = "import sys, gpu.profiles, gpu.step; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
