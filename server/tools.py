"""Tools as chats offer them, and the choice among them: types, and what can be offered to a model or called.

Refuses to know templates and what a model makes of tools. Invariant: tools that pass have names, each its own, and the
one that must be called is among them.
"""

import re
from typing import Any, Literal

import msgspec

from server.api_error import invalid

MAX_TOOLS = 1024
TOOL_NAME = "[A-Za-z0-9_.-]{1,128}"


class Function(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    defer_loading: bool | None = None


class Custom(msgspec.Struct, kw_only=True):
    name: str | None = None
    description: str | None = None
    format: dict[str, Any] | None = None


class Tool(msgspec.Struct, kw_only=True):
    type: str | None = None
    function: Function | None = None
    custom: Custom | None = None
    defer_loading: bool | None = None


class NamedFunction(msgspec.Struct, kw_only=True):
    name: str


class NamedTool(msgspec.Struct, kw_only=True):
    """The one tool that is to be called."""

    type: Literal["function"]
    function: NamedFunction


def check_tools(tools: list[Tool], choice: str | NamedTool | None) -> None:
    """Raises ApiError 400 for what cannot be offered to a model or called."""
    if len(tools) > MAX_TOOLS:
        raise invalid("tools", f"{len(tools)} tools, at most {MAX_TOOLS} are allowed")
    names: set[str] = set()
    for i, tool in enumerate(tools):
        if tool.type != "function":
            raise invalid(f"tools[{i}].type", f"got {(tool.type or '')[:80]!r}, only 'function' is served")
        if tool.function is None:
            raise invalid(f"tools[{i}].function", "missing; wanted an object with a name")
        name, parameters = tool.function.name, tool.function.parameters or {}
        if name is None or re.fullmatch(TOOL_NAME, name) is None:
            raise invalid(f"tools[{i}].function.name", f"got {(name or '')[:80]!r}, wanted {TOOL_NAME}")
        if name in names:
            raise invalid(f"tools[{i}].function.name", f"got {name!r} a second time; wanted a name of its own")
        names.add(name)
        if parameters and parameters.get("type", "object") != "object":
            raise invalid(f"tools[{i}].function.parameters.type", "wanted 'object': arguments have names")
        if not isinstance(parameters.get("properties", {}), dict):
            raise invalid(f"tools[{i}].function.parameters.properties", "wanted an object")
    if choice == "required" and not tools:
        raise invalid("tool_choice", "got 'required' without tools; send `tools`, or leave it out")
    if isinstance(choice, NamedTool) and choice.function.name not in names:
        raise invalid("tool_choice.function.name", f"got {choice.function.name!r}, which is none of `tools`")
