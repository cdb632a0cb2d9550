"""A name that is unknown is told with the one that was meant, if there is one."""

import pytest

from transfer.nearest_name import nearest_name


@pytest.mark.parametrize(
    ("name", "known", "nearest"),
    [
        ("prot", ["progress_seconds", "port"], "port"),
        ("devise", ["dtype", "device"], "device"),
        ("limit", ["device", "memory_limit_gib"], "memory_limit_gib"),
        ("", ["only"], "only"),
    ],
)
def test_a_slip_comes_before_a_part_and_one_is_always_named(name: str, known: list[str], nearest: str) -> None:
    assert nearest_name(name, known) == nearest
