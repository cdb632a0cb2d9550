"""The order of test files, and who takes which: nothing is lost, and a listed file exists."""

from collections import OrderedDict

import pytest
from xdist.scheduler import LoadFileScheduling

from tests.conftest import ROOT
from tests.file_order import COMPILING, LONG, FromBothEnds, in_order


def test_files_that_compile_come_first_and_the_longest_of_the_others_last() -> None:
    others = ["tests/a.py", "tests/b.py"]
    given = [others[0], *LONG, others[1], *reversed(COMPILING)]
    assert in_order(given) == [*COMPILING, *others, *reversed(LONG)]
    assert in_order([others[1], COMPILING[-1]]) == [COMPILING[-1], others[1]]


@pytest.mark.parametrize("name", COMPILING + LONG)
def test_a_listed_file_exists_and_is_listed_once(name: str) -> None:
    assert (ROOT / name).exists()
    assert (COMPILING + LONG).count(name) == 1


class Scheduler(FromBothEnds):
    """One of two processes and four files that runs nothing."""

    nodes = ("gw0", "gw1")

    def __init__(self) -> None:
        self.workqueue = OrderedDict.fromkeys("abcd")


def test_the_first_process_takes_files_from_the_front_and_another_from_the_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken: list[tuple[str, str]] = []

    def take(scheduler: Scheduler, node: str) -> None:
        taken.append((node, scheduler.workqueue.popitem(last=False)[0]))

    monkeypatch.setattr(LoadFileScheduling, "_assign_work_unit", take)
    scheduler = Scheduler()
    for node in ("gw0", "gw1", "gw1", "gw0"):
        scheduler._assign_work_unit(node)
    assert taken == [("gw0", "a"), ("gw1", "d"), ("gw1", "c"), ("gw0", "b")]


def test_what_a_process_ended_in_is_not_run_again_and_what_it_had_left_is() -> None:
    scheduler = Scheduler()
    left = {"c.py": {"c.py::1": True}, "d.py": {"d.py::1": False, "d.py::2": False}, "e.py": {"e.py": False}}
    scheduler.assigned_work = {"gw1": left}
    scheduler.workqueue = OrderedDict()
    assert scheduler.remove_node("gw1") == "d.py::1"
    assert scheduler.workqueue == {"d.py": {"d.py::1": True, "d.py::2": False}, "e.py": {"e.py": False}}
    scheduler.assigned_work = {"gw0": {"f.py": {"f.py": False}}, "gw1": {"e.py": {"e.py": True}}}
    assert scheduler.remove_node("gw1") is None
