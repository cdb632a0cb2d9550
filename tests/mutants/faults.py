"""Faults as data: a file, a text in it, what it becomes, and the tests that see it. What is unsound is refused here.

One file a package, `<package>.toml`, each entry a `[[mutant]]`. This module never runs anything: it reads, checks, and
gives the faulty text. Invariant: a fault that `find_flaws` passes changes what one file means, in one place, and names
tests that are there.
"""

import ast
import tomllib
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path


@dataclass(frozen=True)
class Fault:
    package: str  # the name of the file that holds it
    why: str  # the fault in words: what now goes wrong
    file: str
    text: str  # occurs once in the file
    replacement: str
    tests: tuple[str, ...]  # pytest's ids, the fewest that see it
    breaks_import: bool = False  # tests are not even collected
    may_hang: bool = False  # a test that never ends has seen it

    def apply(self, source: str) -> str:
        return source.replace(self.text, self.replacement)


def read_faults(folder: Path) -> list[Fault]:
    """All faults of `folder/*.toml`. Raises ValueError for an entry with missing or unknown keys."""
    known = {field.name for field in fields(Fault)} - {"package"}
    found = []
    for path in sorted(folder.glob("*.toml")):
        for entry in tomllib.loads(path.read_text()).get("mutant", []):
            if unknown := set(entry) - known:
                raise ValueError(f"{path.name}: {entry.get('why', entry)}: unknown keys {unknown}; known are {known}")
            try:
                found.append(Fault(path.stem, **{**entry, "tests": tuple(entry["tests"])}))
            except (KeyError, TypeError) as error:
                raise ValueError(f"{path.name}: {entry.get('why', entry)}: {error}") from error
    return found


def find_flaws(fault: Fault, root: Path) -> str | None:
    """Why `fault` says nothing about the tree at `root`, or None: then it is worth a run."""
    path = root / fault.file
    if not path.is_file():
        return f"no file {fault.file}"
    source = path.read_text()
    if (count := source.count(fault.text) if fault.text else 0) != 1:
        return f"the text occurs {count} times in {fault.file}, wanted once"
    if path.suffix == ".py":
        try:
            changed = ast.parse(fault.apply(source))
        except SyntaxError as error:
            return f"{fault.file} does not compile with it: {error}"
        begin = source.index(fault.text)
        if _dump(changed, begin, fault.apply(source), len(fault.replacement)) == _dump(
            parse(source), begin, source, len(fault.text)
        ):
            return "the replacement means the same as the text"
    elif fault.text == fault.replacement:
        return "the replacement is the text"
    if not fault.tests:
        return "names no test"
    missing = [test for test in fault.tests if not has_test(root, test)]
    return f"no such test: {', '.join(missing)}" if missing else None


def has_test(root: Path, test: str) -> bool:
    """Whether `file.py`, `file.py::test`, or `file.py::Class::test[case]` is defined; cases are not looked at."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    return path.is_file() and (not names or tuple(names) in list_tests(path))


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def _dump(tree: ast.Module, begin: int, source: str, length: int) -> list[str]:
    """Of a module's statements, those that have a line of `length` characters from `begin` on: others are the same."""
    first = source.count("\n", 0, begin) + 1
    last = first + source.count("\n", begin, begin + length)
    found = []
    for node in tree.body:
        lines = [node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))]
        if min(lines) <= last and (node.end_lineno or last) >= first:
            found.append(ast.dump(node))
    return found


@cache
def list_tests(path: Path) -> frozenset[tuple[str, ...]]:
    tree, found = ast.parse(path.read_text()), set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add((node.name,))
        elif isinstance(node, ast.ClassDef):
            found |= {(node.name,)} | {(node.name, getattr(inner, "name", "")) for inner in node.body}
    return frozenset(found)
