"""The GPU suite's command: its parts hold every test marked `gpu` once, and what went wrong is never a success."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests import gpu_suite
from tests.gpu_suite import Machine, PartResult, SuiteError

MACHINE = Machine("a card", "2.11", "3.12")
GOOD = PartResult("kernels", "abc", MACHINE, 3, 1, 0, 2.0, "whole")


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gpu_suite, "RESULTS", tmp_path)
    return tmp_path


def test_every_gpu_test_of_this_run_is_in_one_part(request: pytest.FixtureRequest) -> None:
    files = [name for part in gpu_suite.PARTS for name in gpu_suite.part_files(part)]
    assert len(files) == len(set(files))
    marked = {item.nodeid.split("::")[0] for item in request.session.items if item.get_closest_marker("gpu")}
    assert marked <= set(files), "name them in PARTS of tests/gpu_suite.py"


@pytest.mark.parametrize("part", gpu_suite.PARTS)
def test_every_pattern_of_a_part_finds_a_file(part: str) -> None:
    assert all(list(gpu_suite.ROOT.glob(pattern)) for pattern in gpu_suite.PARTS[part])


def test_parts_go_by_name_and_by_number() -> None:
    assert gpu_suite.part_names([]) == list(gpu_suite.PARTS)
    assert gpu_suite.part_names(["3/3", "kernels"]) == ["kernels", "server"]
    with pytest.raises(SuiteError, match="part: got 4/3, wanted one of kernels, engine, server, 1/3"):
        gpu_suite.part_names(["4/3"])


def test_what_is_lacking_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(gpu_suite.MODULES, "no_such_module", "its-wheel")
    with pytest.raises(SuiteError, match=r"lacks: its-wheel\n.*installs nothing"):
        gpu_suite.check_modules()


def test_a_test_whose_teardown_fails_too_is_counted_once(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        "<testsuites><testsuite>"
        "<testcase classname='a' name='one'/><testcase classname='a' name='two'><skipped/></testcase>"
        "<testcase classname='a' name='three'><failure/></testcase>"
        "<testcase classname='a' name='three'><error/></testcase>"
        "<testcase classname='b' name='one'><error/></testcase>"
        "</testsuite></testsuites>"
    )
    assert gpu_suite.read_counts(report) == (1, 1, 2)


def test_only_a_whole_part_that_passed_something_and_failed_nothing_is_good() -> None:
    assert GOOD.is_good
    for change in ({"failed": 1}, {"passed": 0}, {"ended": "cut"}, {"ended": "broken"}):
        assert not replace(GOOD, **change).is_good


def test_a_part_keeps_its_row_for_the_same_clean_commit_and_machine_alone(results: Path) -> None:
    gpu_suite.save(GOOD)
    gpu_suite.save(replace(GOOD, part="engine", commit="abc-dirty"))
    gpu_suite.save(replace(GOOD, part="server", commit="unknown"))
    assert gpu_suite.earlier_result("kernels", "abc", MACHINE) == GOOD
    assert gpu_suite.earlier_result("kernels", "abd", MACHINE) is None
    assert gpu_suite.earlier_result("kernels", "abc", replace(MACHINE, torch="2.13")) is None
    assert gpu_suite.earlier_result("engine", "abc-dirty", MACHINE) is None
    assert gpu_suite.earlier_result("server", "unknown", MACHINE) is None


def test_the_table_says_what_was_not_run_and_its_last_line_is_json() -> None:
    cut = replace(GOOD, part="server", failed=2, ended="cut")
    lines = gpu_suite.report_lines({"kernels": GOOD, "engine": None, "server": cut}, "abc", MACHINE)
    assert lines[0] == "GPU suite of abc on a card, torch 2.11, Python 3.12"
    assert [line.split() for line in lines[2:-1]] == [
        ["kernels", "3", "1", "0", "2"],
        ["engine", "not", "run"],
        ["server", "3", "1", "2", "2", "cut"],
        ["total", "6", "2", "2", "4"],
    ]
    assert lines[-1].startswith('{"commit": "abc", "gpu": "a card"')


def test_the_commit_is_the_one_that_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COMMIT", "abc")
    assert gpu_suite.find_commit() == "abc"
    monkeypatch.delenv("COMMIT")
    monkeypatch.setattr(gpu_suite, "ROOT", tmp_path)
    assert gpu_suite.find_commit() == "unknown"


def test_without_a_device_nothing_is_run_and_the_status_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], results: Path
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert gpu_suite.main(["kernels"]) == 2
    assert "error: torch finds no CUDA device" in capsys.readouterr().err
    assert list(results.iterdir()) == []
