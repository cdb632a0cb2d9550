"""Contexts on disk of an engine that is killed: no wrong text, no growth (`restart_soak`, which runs for longer)."""

import os
import time
from pathlib import Path
from random import Random

from tests.scheduler.restart_soak import Soak

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "4"))
MOST_SECONDS = 100.0  # a busy machine takes longer than SECONDS until the first engine answers


def test_a_killed_engine_goes_on_with_the_texts_of_a_cold_one_within_its_limit(tmp_path: Path) -> None:
    soak = Soak(tmp_path, "tiny", Random(1))
    begun = time.monotonic()
    soak.run(SECONDS)
    while not soak.counts["texts"] and time.monotonic() < begun + MOST_SECONDS:
        soak.run(SECONDS)
    assert soak.counts["lives"] >= 1
    assert soak.counts["texts"] >= 1
