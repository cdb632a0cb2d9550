"""Private attributes that methods read are set somewhere. mypy does not check these packages; a rename may miss one."""

import ast
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("gpu", "cpu", "bench", "evals", "lab")
Classes = dict[str, list[ast.ClassDef]]


def list_classes(trees: list[ast.Module]) -> Classes:
    """Return the classes of modules by name; several modules may have one of the same name."""
    found: Classes = defaultdict(list)
    for tree in trees:
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(node)
    return found


@cache
def own_names(owner: ast.ClassDef) -> frozenset[str]:
    """Return the names that a class declares in its body, or sets on an object."""
    found = set()
    for node in ast.walk(owner):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return frozenset(found)


def names_set(owner: ast.ClassDef, classes: Classes, seen: frozenset[str] = frozenset()) -> set[str]:
    """Return the names that a class or one of its bases sets."""
    found = {*own_names(owner)}
    for base in owner.bases:
        name = getattr(base, "id", getattr(base, "attr", getattr(getattr(base, "value", None), "id", "")))
        if name not in seen:
            for one in classes.get(name, ()):
                found |= names_set(one, classes, seen | {name})
    return found


def is_private_of_self(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Name)
        and node.value.id == "self" and node.attr.startswith("_") and not node.attr.startswith("__")
    )  # fmt: skip


def unset_names(classes: Classes) -> Iterator[str]:
    """Yield `Class._name` for each private attribute that a class reads of `self` and that nothing sets."""
    for name, owners in classes.items():
        for owner in owners:
            read = {node.attr for node in ast.walk(owner) if is_private_of_self(node)}
            yield from (f"{name}.{one}" for one in sorted(read - names_set(owner, classes)))


def test_private_attributes_that_are_read_are_set_by_the_class_or_a_base() -> None:
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    assert [*unset_names(list_classes([ast.parse(path.read_text(encoding="utf-8")) for path in paths]))] == []


def test_a_name_that_a_rename_missed_is_found() -> None:
    source = """
class Base:
    def __init__(self):
        self._kept = 0

class Counts(Base):
    def counts(self):
        return self._kept, self._on_host, self._host_counts

    def end_step(self):
        self._on_host = [1]
"""
    assert [*unset_names(list_classes([ast.parse(source)]))] == ["Counts._host_counts"]
