"""Find the environments that `make test-fleet` makes, or say that one is missing."""

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENTS = ROOT / ".venv-fleet"


def program_of(environment: str, program: str) -> Path:
    """Return the path of a program of an environment; skip the test where it is not installed."""
    found = ENVIRONMENTS / environment / "bin" / program
    if not found.exists():
        pytest.skip(f"no {environment} in {ENVIRONMENTS.name}: `make test-fleet` installs it")
    return found
