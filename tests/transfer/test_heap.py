"""What malloc holds and nobody uses goes back to the system, and what is used stays."""

import psutil

from transfer.host_pages import give_back_heap

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
