"""Replace tools, parts and items of unknown types, for the bodies whose clients send new types with each release.

An unknown tool is not offered. An unknown part or item becomes a text that names its type, so that one of them in a
history does not fail every later request.
"""

from collections.abc import Collection
from typing import Any

from server.bodies.fields import MOST_IGNORED

Tree = dict[str, Any]


def is_unknown(tree: Any, known: Collection[str | None], path: str, ignored: list[str]) -> bool:
    """Return whether an object has a type that is not among `known`; if so, add its path to `ignored`."""
    kind = tree.get("type") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind in known:
        return False
    if len(ignored) < MOST_IGNORED:
        ignored.append(path)
    return True


def replace_parts(parts: Any, known: Collection[str], path: str, ignored: list[str]) -> Any:
    """Return a list of parts with a text in place of each of an unknown type; any other value as it is."""
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "text", "text": placeholder(part)} if is_unknown(part, known, f"{path}[{j}]", ignored) else part
        for j, part in enumerate(parts)
    ]


def placeholder(tree: Tree) -> str:
    """Return the text that stands in place of an object of an unknown type."""
    return f"[{tree['type'][:64]} is not shown to this model]"
