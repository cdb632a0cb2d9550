"""Replace what `/v1/messages` does not know: drop tools of other types, and name blocks of other types in a text."""

from typing import Any

from server.bodies.unknown_variants import Tree, is_unknown, replace_parts

_BLOCKS = {"text", "thinking", "tool_use", "tool_result"}


def replace_unknown_blocks(tree: Any, ignored: list[str]) -> Any:
    """Return a body's JSON with unknown tools left out and unknown blocks replaced; add their paths to `ignored`."""
    if not isinstance(tree, dict):
        return tree
    tree = dict(tree)
    if isinstance(tree.get("tools"), list):
        tools = enumerate(tree["tools"])
        tree["tools"] = [tool for i, tool in tools if not is_unknown(tool, {None, "custom"}, f"tools[{i}]", ignored)]
    if "system" in tree:
        tree["system"] = replace_parts(tree["system"], {"text"}, "system", ignored)
    if isinstance(tree.get("messages"), list):
        tree["messages"] = [
            _replace_turn(turn, f"messages[{i}]", ignored) if isinstance(turn, dict) else turn
            for i, turn in enumerate(tree["messages"])
        ]
    return tree


def _replace_turn(turn: Tree, path: str, ignored: list[str]) -> Tree:
    content = replace_parts(turn.get("content"), _BLOCKS, f"{path}.content", ignored)
    if isinstance(content, list):
        content = [
            block | {"content": replace_parts(block.get("content"), {"text"}, f"{path}.content[{j}].content", ignored)}
            if isinstance(block, dict) and block.get("type") == "tool_result"
            else block
            for j, block in enumerate(content)
        ]
    return turn | {"content": content}
