"""What is made of tools, content parts and items of types that `/v1/responses` and `/v1/messages` do not know.

The functions of a namespace are offered. A tool of another type is not; a part or an item of another type becomes a
text that names the type, so that one of them in a history does not fail every later request; the output of such a call
is what the user says. Knows type names alone.
"""

from functools import partial
from typing import Any

from server.bodies.fields import MOST_IGNORED

Tree = dict[str, Any]

_BLOCKS = {"text", "thinking", "tool_use", "tool_result"}
_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
_ITEMS = {None, "message", "function_call", "function_call_output", "reasoning", "item_reference"}


def replace_unknown(tree: Any, is_response: bool, ignored: list[str]) -> Any:
    """Return a body's JSON with unknown tools left out and unknown parts replaced; where each stood is added to
    `ignored`. is_response: the body is one of `/v1/responses`, else of `/v1/messages` or its count route."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    known_tools = {"function"} if is_response else {None, "custom"}
    if isinstance(tree.get("tools"), list):
        tools = [(f"tools[{i}]", tool) for i, tool in enumerate(tree["tools"])]
        if is_response:
            tools = [inner for at, tool in tools for inner in _open_namespace(at, tool)]
        tree["tools"] = [tool for at, tool in tools if not _is_unknown(tool, known_tools, at, ignored)]
    if is_response:
        given = tree.get("input")
        places = {"input": _each(given, "input", partial(_item, lost_calls=_unknown_calls(given)), ignored)}
    else:
        places = {
            "system": _texts(tree.get("system"), {"text"}, "system", ignored),
            "messages": _each(tree.get("messages"), "messages", _turn, ignored),
        }
    return tree | {name: value for name, value in places.items() if name in tree}


def _open_namespace(at: str, tool: Any) -> list[tuple[str, Any]]:
    """The tools of a namespace, each with where it stood and the namespace's name; any other tool as it is."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return [(at, tool)]
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        return [(at, tool)]
    return [
        (f"{at}.tools[{j}]", inner | {"namespace": name} if isinstance(inner, dict) else inner)
        for j, inner in enumerate(tools)
    ]


def _each(trees: Any, at: str, read: Any, ignored: list[str]) -> Any:
    if not isinstance(trees, list):
        return trees
    return [read(one, f"{at}[{i}]", ignored) if isinstance(one, dict) else one for i, one in enumerate(trees)]


def _turn(turn: Tree, at: str, ignored: list[str]) -> Tree:
    content = _texts(turn.get("content"), _BLOCKS, f"{at}.content", ignored)
    if isinstance(content, list):
        content = [
            block | {"content": _texts(block.get("content"), {"text"}, f"{at}.content[{j}].content", ignored)}
            if isinstance(block, dict) and block.get("type") == "tool_result"
            else block
            for j, block in enumerate(content)
        ]
    return turn | {"content": content}


def _unknown_calls(items: Any) -> set[str]:
    """Return the ids of calls that are told as a placeholder, such as a `local_shell_call`'s."""
    unknown = [
        item.get("call_id") for item in (items if isinstance(items, list) else ()) if _is_unknown(item, _ITEMS, "", [])
    ]
    return {call_id for call_id in unknown if isinstance(call_id, str)}


def _item(item: Tree, at: str, ignored: list[str], lost_calls: set[str]) -> Tree:
    if _is_unknown(item, _ITEMS, at, ignored):
        role = "assistant" if item["type"].endswith("_call") else "user"
        return {"type": "message", "role": role, "content": _placeholder(item)}
    read = item | {
        field: _texts(item[field], _PARTS, f"{at}.{field}", ignored) for field in ("content", "output") if field in item
    }
    call_id = item.get("call_id")
    if item.get("type") == "function_call_output" and isinstance(call_id, str) and call_id in lost_calls:
        return {"type": "message", "role": "user", "content": read.get("output")}
    return read


def _texts(parts: Any, known: set[str], at: str, ignored: list[str]) -> Any:
    """A list of parts, with a text for each of an unknown type; any other value as it is."""
    if not isinstance(parts, list):
        return parts
    return [
        {"type": "text", "text": _placeholder(part)} if _is_unknown(part, known, f"{at}[{j}]", ignored) else part
        for j, part in enumerate(parts)
    ]


def _is_unknown(tree: Any, known: Any, at: str, ignored: list[str]) -> bool:
    kind = tree.get("type") if isinstance(tree, dict) else None
    if not isinstance(kind, str) or kind in known:
        return False
    if len(ignored) < MOST_IGNORED:
        ignored.append(at)
    return True


def _placeholder(tree: Tree) -> str:
    return f"[{tree['type'][:64]} is not shown to this model]"
