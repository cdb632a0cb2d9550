"""Trials of faults. A fault is killed if a test that passes on the sound copy runs and fails with the fault in it.

A file that cannot be collected, a name that does not exist, and a test that runs out of time are no kills.
"""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

from tests.mutants.faults import Fault, find_flaws
from tests.mutants.tree import Tree

KILLED, SKIPPED, BROKEN, SURVIVED = "killed", "skipped", "BROKEN", "SURVIVED"
# What these say is that the faulty text is no program, which any test would see.
NO_PROGRAM = ("NameError", "ImportError", "ModuleNotFoundError", "SyntaxError", "numba.core.errors")
FAILED = 1  # pytest's exit status where tests ran and some failed


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    state: str
    words: str  # by which test, or why it says nothing
    seconds: float


@dataclass(frozen=True)
class Case:
    name: str  # `package.module::test[case]`
    state: str  # passed, failed, skipped
    words: str
    seconds: float

    def belongs_to(self, test: str) -> bool:
        file, *names = test.split("::")
        if not names:
            return self.name.startswith(file.removesuffix(".py").replace("/", ".") + "::")
        wanted = ".".join([file.removesuffix(".py").replace("/", "."), *names[:-1]]) + "::" + names[-1]
        return self.name == wanted or self.name.startswith(wanted + "[")


class Trials:
    """Try faults in one tree, one after another. `stop` ends what runs, from another thread."""

    def __init__(self, tree: Tree) -> None:
        self.tree = tree
        self.stopped = threading.Event()
        self.process: subprocess.Popen[bytes] | None = None

    def stop(self) -> None:
        self.stopped.set()
        if self.process is not None:
            end_group(self.process)

    def run(self, faults: list[Fault], report: Callable[[Verdict], None]) -> None:
        """Run the tests on the sound copy, then with each fault, and call `report` with each verdict."""
        sound = []
        for fault in faults:
            if flaw := find_flaws(fault, self.tree.root):
                report(Verdict(fault, BROKEN, flaw, 0.0))
            else:
                sound.append(fault)
        if not sound:
            return
        if strangers := self.tree.find_strangers({fault.file for fault in sound}):
            raise RuntimeError(f"the copy is not what is imported: {strangers}")
        tests = sorted({test for fault in sound for test in fault.tests})
        _, cases = self.run_tests(tests, self.tree.numba_cache, None, "--continue-on-collection-errors")
        for fault in sound:
            if self.stopped.is_set():
                return
            report(self.judge_baseline(fault, cases) or self.try_fault(fault, cases))

    def judge_baseline(self, fault: Fault, cases: list[Case]) -> Verdict | None:
        """Return a verdict where the sound run decides already: the tests do not pass, or are skipped here."""
        skipped = []
        for test in fault.tests:
            states = {case.state: case.words for case in cases if case.belongs_to(test)}
            if "failed" in states or not states:
                words = f"{test} does not pass without the fault: {states.get('failed', 'it did not run')}"
                return Verdict(fault, BROKEN, words, 0.0)
            if "passed" not in states:
                skipped.append(states["skipped"])
        return Verdict(fault, SKIPPED, skipped[0], 0.0) if len(skipped) == len(fault.tests) else None

    def try_fault(self, fault: Fault, cases: list[Case]) -> Verdict:
        usual = sum(case.seconds for case in cases if any(case.belongs_to(test) for test in fault.tests))
        begin = time.monotonic()
        with self.tree.broken_by(fault) as numba_cache:
            status, failed = self.run_tests(list(fault.tests), numba_cache, 90 + 10 * usual, "-x")
        state, words = judge(fault, status, [case for case in failed if case.state == "failed"])
        return Verdict(fault, state, words, time.monotonic() - begin)

    def run_tests(
        self, tests: list[str], numba_cache: Path, limit_seconds: float | None, *options: str
    ) -> tuple[int | None, list[Case]]:
        """Return pytest's exit status (None where it ran out of time) and the cases that it reported."""
        results = self.tree.root.parent / "results.xml"
        results.unlink(missing_ok=True)
        command = [sys.executable, "-m", "pytest", *tests, *options, f"--junitxml={results}"]
        with (self.tree.root.parent / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [*command, "-p", "no:cacheprovider"],
                cwd=self.tree.root,
                env=self.tree.environment(numba_cache),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                status = self.process.wait(limit_seconds)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                end_group(self.process)  # and servers that a faulty test left
        return status, read_cases(results)


def judge(fault: Fault, status: int | None, failed: list[Case]) -> tuple[str, str]:
    if status is None or any(case.words.startswith("Failed: Timeout") for case in failed):
        return BROKEN, "a test ran out of time"
    if status == 0:
        return SURVIVED, ", ".join(fault.tests)
    if any(case.words == "collection failure" for case in failed):
        return BROKEN, "a test file cannot be imported"
    if status != FAILED or not failed:
        return BROKEN, f"pytest ended with status {status}"
    first = failed[0]
    if first.words.startswith(NO_PROGRAM):
        return BROKEN, f"not a program: {first.words}"
    return KILLED, first.name


def read_cases(results: Path) -> list[Case]:
    return [read_case(element) for element in ElementTree.parse(results).iter("testcase")] if results.exists() else []


def read_case(element: ElementTree.Element) -> Case:
    name = f"{element.get('classname')}::{element.get('name')}"
    state, words = "passed", ""
    for child in element:
        if child.tag in ("failure", "error", "skipped"):
            state = "skipped" if child.tag == "skipped" else "failed"
            words = first_line(child.get("message", ""))
    return Case(name, state, words, float(element.get("time", 0)))


def first_line(text: str) -> str:
    return next(iter(text.splitlines()), "")


def end_group(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def share_out(faults: Iterable[Fault], num_shares: int) -> list[list[Fault]]:
    """Divide the faults. Those of one test file stay together, so that its sound run is made once."""
    groups: dict[str, list[Fault]] = {}
    for fault in faults:
        groups.setdefault(fault.tests[0].partition("::")[0] if fault.tests else "", []).append(fault)
    shares: list[list[Fault]] = [[] for _ in range(num_shares)]
    for group in sorted(groups.values(), key=len, reverse=True):
        min(shares, key=len).extend(group)
    return [share for share in shares if share]
