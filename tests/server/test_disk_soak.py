"""A server with contexts on disk through kills and restarts (`disk_soak`, which runs for longer)."""

import os
from pathlib import Path
from random import Random

import pytest

from tests.server.disk_soak import ServerSoak

SECONDS = float(os.environ.get("TANDEM_SOAK_SECONDS", "120"))


@pytest.mark.long
def test_a_server_that_is_killed_and_ended_in_turn_says_what_a_cold_one_says(tmp_path: Path) -> None:
    soak = ServerSoak(tmp_path, Random(1))
    soak.run(SECONDS, most_life=20.0)
    assert soak.faults == []
    assert soak.counts["texts compared"] > 0
