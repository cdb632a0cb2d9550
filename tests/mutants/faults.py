"""Faults as data, in `<package>.toml`: a file, a text in it, its replacement, and the tests that see it."""

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

    def apply(self, source: str) -> str:
        return source.replace(self.text, self.replacement)


def read_faults(folder: Path) -> list[Fault]:
    """Read all faults of `folder/*.toml`. Raises ValueError for an entry with missing or unknown keys."""
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
    """Return why `fault` says nothing about the tree at `root`, or None if it is sound."""
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
    """Return whether `file.py`, `file.py::test`, or `file.py::Class::test[case]` is defined, whatever the case."""
    file, *names = test.partition("[")[0].split("::")
    path = root / file
    return path.is_file() and (not names or tuple(names) in list_tests(path))


@cache
def parse(source: str) -> ast.Module:
    return ast.parse(source)


def _dump(tree: ast.Module, begin: int, source: str, length: int) -> list[str]:
    """Dump the statements of a module that have a line among `length` characters from `begin`."""
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
