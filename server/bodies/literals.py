"""Find the values that a body field's type allows, for errors about other values."""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from msgspec import inspect

_STEP = re.compile(r"\.([A-Za-z_]\w*)|\[(?:\d+|\.\.\.)\]")
_LISTS = (inspect.ListType, inspect.VarTupleType)


def literals_at(body: type, path: str) -> list[Any]:
    """Return the literal values that a struct's type allows at a path in msgspec's form (`.tools[0].type`); [] if its
    type has none.
    """
    nodes: list[inspect.Type] = [_type_of(body)]
    for step in _STEP.finditer(path):
        nodes = [inside for node in nodes for one in _kinds(node) for inside in _enter(one, step[1])]
    return [value for node in nodes for one in _kinds(node) for value in _values(one)]


@cache
def _type_of(body: type) -> inspect.Type:
    return inspect.type_info(body)


def _kinds(node: inspect.Type) -> Iterator[inspect.Type]:
    """Return the types that a value may have, looking through unions and constraints."""
    if isinstance(node, inspect.UnionType):
        for one in node.types:
            yield from _kinds(one)
    elif isinstance(node, inspect.Metadata):
        yield from _kinds(node.type)
    else:
        yield node


def _enter(node: inspect.Type, name: str | None) -> list[inspect.Type]:
    if isinstance(node, inspect.StructType):
        if name is not None and name == node.tag_field:
            return [inspect.LiteralType((node.tag,))]
        return [field.type for field in node.fields if field.encode_name == name]
    return [node.item_type] if isinstance(node, _LISTS) and name is None else []


def _values(node: inspect.Type) -> list[Any]:
    if isinstance(node, inspect.LiteralType):
        return list(node.values)
    return []
