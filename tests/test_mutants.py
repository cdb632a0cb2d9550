"""The faults on file are sound data, and the command that applies them tells a seen fault from an unseen one."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.mutants.__main__ import choose, exit_status
from tests.mutants.changed import find_tests, read_changed_lines
from tests.mutants.fault_trial import BROKEN, Case, Verdict, judge, share_out
from tests.mutants.faults import Fault, find_flaws, read_faults
from tests.mutants.tree import Tree, find_importers

ROOT = Path(__file__).resolve().parents[1]
TOY = {
    "toy/__init__.py": "",
    "toy/sums.py": "LIMIT = 3\n\n\ndef add(a, b):\n    return a + b\n\n\ndef fill():\n    return min(9, LIMIT)\n",
    "toy/totals.py": "from toy import sums\n\n\ndef total():\n    return sums.fill()\n",
    "tests/test_sums.py": (
        "import subprocess, sys\nimport pytest\nfrom toy.sums import add\n"
        "ADD = [sys.executable, '-c', 'import toy.sums; print(toy.sums.add(1, 2))']\n"
        "def test_elsewhere():\n    assert subprocess.check_output(ADD) == b'3\\n'\n"
        "def test_nothing():\n    assert add(1, 1)\n"
        "def test_wrong():\n    assert add(2, 3) == 6\n"
        "@pytest.mark.skip(reason='no such device')\ndef test_device():\n    assert add(2, 3) == 5\n"
    ),
    "tests/mutants/toy.toml": "\n".join(
        f"[[mutant]]\nwhy = '{why}'\nfile = 'toy/sums.py'\ntext = 'return a + b'\nreplacement = '{becomes}'\n"
        f"tests = ['tests/test_sums.py::{test}']\n"
        for why, becomes, test in [
            ("seen by another process", "return a - b", "test_elsewhere"),
            ("unseen", "return abs(a + b)", "test_nothing"),
            ("of a device", "return a - b", "test_device"),
            ("of a test that fails anyway", "return a - b", "test_wrong"),
        ]
    ),
}


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    root = tmp_path / "project"
    for name, text in TOY.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    subprocess.run(["git", "init", "--quiet"], cwd=root, check=True)
    return root


def run_command(root: Path, *arguments: str) -> tuple[int, str]:
    command = [sys.executable, "-m", "tests.mutants", "--root", str(root), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=200, check=False)
    return done.returncode, done.stdout + done.stderr


def test_every_fault_on_file_is_sound() -> None:
    faults = read_faults(ROOT / "tests" / "mutants")
    flaws = [f"{fault.package}: {fault.why}: {flaw}" for fault in faults if (flaw := find_flaws(fault, ROOT))]
    assert flaws == []
    assert len({fault.why for fault in faults}) == len(faults), "each is said in words of its own"
    assert len(faults) <= 150, "faults of small changes are for `make mutants-changed`"


def test_the_command_tells_a_seen_fault_from_an_unseen_one(toy: Path) -> None:
    before = {name: (toy / name).read_text() for name in TOY}
    status, printed = run_command(toy, "-j", "1")
    rows = [[cell.strip() for cell in line.split("│")[2:-2]] for line in printed.splitlines() if line.startswith("│")]
    assert [row for row in rows if row[0]] == [
        ["seen by another process (toy/sums.py)", "killed", "tests.test_sums::test_elsewhere"],
        ["of a device (toy/sums.py)", "skipped", "no such device"],
        ["of a test that fails anyway (toy/sums.py)", "BROKEN", rows[2][2]],
        ["unseen (toy/sums.py)", "SURVIVED", "tests/test_sums.py::test_nothing"],
    ]
    assert "does not pass without the fault" in rows[2][2]
    assert status == 1
    assert "of 4: 1 killed, 1 skipped, 1 BROKEN, 1 SURVIVED" in printed
    assert {name: (toy / name).read_text() for name in TOY} == before


@pytest.mark.parametrize(("state", "status"), [("killed", 0), ("skipped", 0), ("BROKEN", 1), ("SURVIVED", 1)])
def test_the_command_fails_for_a_survivor_or_data_that_say_nothing(state: str, status: int) -> None:
    assert exit_status([Verdict(FAULT, "killed", "", 0.0), Verdict(FAULT, state, "", 0.0)]) == status


def test_faults_are_chosen_by_file_and_description() -> None:
    faults = [FAULT, replace(FAULT, file="other/a.py", why="unseen")]
    assert choose(faults, None) == faults
    assert choose(faults, ["other/*"]) == faults[1:]
    assert choose(faults, ["diff*"]) == faults[:1]
    assert choose(faults, ["other/*", "diff*"]) == faults


def test_a_choice_that_matches_nothing_is_an_error(toy: Path) -> None:
    status, printed = run_command(toy, "--only", "tyo")
    assert status == 2
    assert "no fault matches" in printed


FAULT = Fault("toy", "differences", "toy/sums.py", "a + b", "a - b", ("tests/test_sums.py::test_nothing",))
FLAWS = {
    "no file": replace(FAULT, file="toy/sum.py"),
    "occurs 0 times": replace(FAULT, text="a + c"),
    "occurs 2 times": replace(FAULT, text="return"),
    "does not compile": replace(FAULT, replacement="a +"),
    "means the same": replace(FAULT, replacement="a  +  b"),
    "names no test": replace(FAULT, tests=()),
    "no such test: tests/test_sums.py::test_nothin": replace(FAULT, tests=("tests/test_sums.py::test_nothin",)),
    "no such test: tests/test_sum.py": replace(FAULT, tests=("tests/test_sum.py",)),
}


@pytest.mark.parametrize("flaw", FLAWS)
def test_a_fault_that_says_nothing_is_refused(toy: Path, flaw: str) -> None:
    assert find_flaws(FAULT, toy) is None
    assert flaw in (find_flaws(FLAWS[flaw], toy) or "")


def test_a_misspelt_key_is_refused(toy: Path) -> None:
    (toy / "tests/mutants/toy.toml").write_text('[[mutant]]\nwhy = "w"\nfiel = "f"\n')
    with pytest.raises(ValueError, match=r"unknown keys \{'fiel'\}"):
        read_faults(toy / "tests" / "mutants")


def test_only_a_test_that_ran_and_failed_is_a_kill() -> None:
    failed = [Case("tests.test_sums::test_add", "failed", "assert 1 == 5", 0.1)]
    assert judge(FAULT, 1, failed)[0] == "killed"
    assert judge(FAULT, 0, [])[0] == "SURVIVED"
    assert judge(FAULT, 1, [])[0] == BROKEN
    assert judge(FAULT, 1, [replace(failed[0], words="NameError: name 'c' is not defined")])[0] == BROKEN
    for status in (2, 3, 4, 5, -9):
        assert judge(FAULT, status, [])[0] == BROKEN
    uncollected = [Case("::tests.test_sums", "failed", "collection failure", 0.0)]
    assert judge(FAULT, 2, uncollected)[0] == BROKEN
    hung = [Case("tests.test_sums::test_add", "failed", "Failed: Timeout (>5.0s) from pytest-timeout.", 5.0)]
    for status, cases in ((None, []), (1, hung)):
        assert judge(FAULT, status, cases)[0] == BROKEN


def test_a_case_belongs_to_its_test_alone() -> None:
    case = Case("tests.test_sums::test_add[2-3]", "passed", "", 0.0)
    assert case.belongs_to("tests/test_sums.py::test_add")
    assert case.belongs_to("tests/test_sums.py::test_add[2-3]")
    assert case.belongs_to("tests/test_sums.py")
    assert not case.belongs_to("tests/test_sums.py::test_nothin")
    assert not case.belongs_to("tests/test_sum.py")
    assert Case("tests.test_sums.TestAdd::test_two", "passed", "", 0.0).belongs_to(
        "tests/test_sums.py::TestAdd::test_two"
    )


def test_compiled_code_that_a_fault_reaches_is_not_used(toy: Path, tmp_path: Path) -> None:
    tree = Tree(toy, tmp_path / "copy", threads=1)
    assert tree.importers["toy/sums.py"] == {"toy/sums.py", "toy/totals.py"}
    assert tree.importers["toy/totals.py"] == {"toy/totals.py"}
    for entry in ("toy_0a1b/sums.add-1.nbi", "toy_0a1b/totals.total-4.nbi", "toy_0a1b/other.nbi", "cpu_2c/sums.nbi"):
        (tree.numba_cache / entry).parent.mkdir(parents=True, exist_ok=True)
        (tree.numba_cache / entry).touch()
    before = os.stat(tree.root / FAULT.file)
    with tree.broken_by(FAULT) as cache:
        assert "a - b" in (tree.root / FAULT.file).read_text()
        assert {str(path.relative_to(cache)) for path in cache.rglob("*.nbi")} == {
            "toy_0a1b/other.nbi",
            "cpu_2c/sums.nbi",
        }
    assert (tree.root / FAULT.file).read_text() == TOY[FAULT.file]
    assert os.stat(tree.root / FAULT.file).st_mtime_ns == before.st_mtime_ns, "the sound cache stays valid"
    assert not cache.exists()


def test_imports_are_followed_through_the_project() -> None:
    importers = find_importers(ROOT)
    assert "cpu/lookup.py" in importers["cpu/pieces.py"]
    assert "cpu/host_attention.py" in importers["transfer/simd/vectors.py"]
    assert "transfer/simd/vectors.py" not in importers["cpu/host_attention.py"]


def test_large_files_are_linked(toy: Path, tmp_path: Path) -> None:
    (toy / "weights.bin").write_bytes(bytes(1 << 20))
    tree = Tree(toy, tmp_path / "copy", threads=1)
    assert (tree.root / "weights.bin").is_symlink()
    assert not (tree.root / FAULT.file).is_symlink()


def test_faults_of_a_test_file_are_tried_in_one_tree() -> None:
    faults = [replace(FAULT, why=str(index), tests=(f"tests/test_{index % 3}.py::test",)) for index in range(9)]
    shares = share_out(faults, 2)
    assert sorted(len(share) for share in shares) == [3, 6]
    files = [{fault.tests[0] for fault in share} for share in shares]
    assert not files[0] & files[1]


def test_the_lines_that_a_diff_adds_are_mutated_and_those_it_removes_are_not() -> None:
    diff = "--- a/cpu/a.py\n+++ b/cpu/a.py\n@@ -3 +3,2 @@ def f():\n@@ -9,2 +11,0 @@\n@@ -20 +20 @@\n"
    assert read_changed_lines(diff) == {"cpu/a.py": ["3-4", "20-20"]}


def test_a_mutant_is_tried_with_the_tests_that_import_its_file() -> None:
    tests = find_tests("cpu/collision.py")
    assert "tests/cpu/test_collision.py" in tests
    assert "tests/test_mutants.py" not in tests
