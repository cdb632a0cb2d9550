"""What malloc holds and nobody uses goes back to the system, and what was read of libraries; what is used stays."""

import sys

import psutil
import pytest
import torch

from transfer.host_pages import give_back_heap, give_back_programs

PIECE, COUNT = 100_000, 1000  # below what malloc maps by itself


def resident_bytes() -> int:
    return psutil.Process().memory_info().rss


def test_freed_pieces_in_front_of_one_that_is_used_go_back_to_the_system() -> None:
    pieces = [bytearray(b"x" * PIECE) for _ in range(COUNT)]
    last = pieces[-1]
    del pieces
    held = resident_bytes()
    give_back_heap()
    assert held - resident_bytes() > PIECE * COUNT // 2
    assert last == b"x" * PIECE


@pytest.mark.skipif(sys.platform != "linux", reason="/proc/self/smaps")
def test_what_was_read_of_a_library_goes_back_and_it_computes_as_before() -> None:
    x = torch.arange(40_000.0).view(200, 200) / 40_000
    before, held = x @ x, program_bytes()
    give_back_programs()
    assert program_bytes() < held // 2
    assert torch.equal(x @ x, before)


def program_bytes() -> int:
    """Return the resident bytes of what this process runs from files."""
    regions = psutil.Process().memory_maps(grouped=False)
    return sum(region.rss for region in regions if region.perms == "r-xp" and region.path.startswith("/"))
