"""Replace what `/v1/responses` does not know: drop unknown tools, and name unknown items in a text.

The functions of a namespace are offered by its name and theirs.
The result of a call of an unknown type, such as a `local_shell_call`, becomes what the user says.
"""

from typing import Any

from server.bodies.unknown_variants import Tree, is_unknown, placeholder, replace_parts

_PARTS = {"input_text", "output_text", "text", "reasoning_text", "summary_text"}
_ITEMS = {None, "message", "function_call", "function_call_output", "reasoning", "item_reference"}


def replace_unknown_items(tree: Any, ignored: list[str]) -> Any:
    """Return a body's JSON with unknown tools left out and unknown items replaced; add their paths to `ignored`."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    if isinstance(tree.get("tools"), list):
        tools = [inner for i, tool in enumerate(tree["tools"]) for inner in _open_namespace(f"tools[{i}]", tool)]
        tree["tools"] = [tool for path, tool in tools if not is_unknown(tool, {"function"}, path, ignored)]
    items = tree.get("input")
    if isinstance(items, list):
        unknown_calls = _unknown_calls(items)
        tree["input"] = [
            _replace_item(item, f"input[{i}]", ignored, unknown_calls) if isinstance(item, dict) else item
            for i, item in enumerate(items)
        ]
    return tree


def _open_namespace(path: str, tool: Any) -> list[tuple[str, Any]]:
    """Return the tools of a namespace, each with its path and the namespace's name; any other tool as it is."""
    if not isinstance(tool, dict) or tool.get("type") != "namespace":
        return [(path, tool)]
    name, tools = tool.get("name"), tool.get("tools")
    if not isinstance(name, str) or not isinstance(tools, list):
        return [(path, tool)]
    return [
        (f"{path}.tools[{j}]", inner | {"namespace": name} if isinstance(inner, dict) else inner)
        for j, inner in enumerate(tools)
    ]


def _unknown_calls(items: list[Any]) -> set[str]:
    """Return the ids of calls of unknown types."""
    call_ids = [item.get("call_id") for item in items if is_unknown(item, _ITEMS, "", [])]
    return {call_id for call_id in call_ids if isinstance(call_id, str)}


def _replace_item(item: Tree, path: str, ignored: list[str], unknown_calls: set[str]) -> Tree:
    if is_unknown(item, _ITEMS, path, ignored):
        role = "assistant" if item["type"].endswith("_call") else "user"
        return {"type": "message", "role": role, "content": placeholder(item)}
    read = item | {
        field: replace_parts(item[field], _PARTS, f"{path}.{field}", ignored)
        for field in ("content", "output")
        if field in item
    }
    call_id = item.get("call_id")
    if item.get("type") == "function_call_output" and isinstance(call_id, str) and call_id in unknown_calls:
        return {"type": "message", "role": "user", "content": read.get("output")}
    return read
