"""Run a file's tests again in a process whose vectors are those of AVX2."""

import os
import subprocess
import sys

import pytest

from transfer.simd.features import LANES

where_vectors_are_wide = pytest.mark.skipif(LANES == 8, reason="this process has the narrow vectors already")


def run_with_narrow_vectors(file: str, names: str) -> None:
    """Run the tests of a file that `names` selects, as pytest's `-k` does: all of them pass, and there are some."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", file, "-k", names],
        env=os.environ | {"TANDEM_SIMD": "avx2"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[100%]" in done.stdout
