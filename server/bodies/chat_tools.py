"""Define tools as chats offer them, and the choice among them: types and checks.

Checked tools have distinct names, and the tool that must be called is among them.
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
    type: Literal["function"]
    function: NamedFunction


class AllowedTools(msgspec.Struct, kw_only=True):
    mode: Literal["auto", "required"]
    tools: list[NamedTool]


class ChosenTool(msgspec.Struct, kw_only=True):
    """Hold `tool_choice` as an object: the one function that must be called, or those of `tools` that may be called."""

    type: Literal["function", "allowed_tools"]
    function: NamedFunction | None = None
    allowed_tools: AllowedTools | None = None

    @property
    def called_name(self) -> str | None:
        """Return the name of the function that must be called, None if none must."""
        return self.function.name if self.function is not None else None

    @property
    def allowed_names(self) -> set[str] | None:
        """Return the names of the functions that may be called, None if all may."""
        return None if self.allowed_tools is None else {tool.function.name for tool in self.allowed_tools.tools}


def check_tools(tools: list[Tool], choice: str | ChosenTool | None) -> None:
    """Check tools and the choice among them. Raises ApiError 400."""
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
            raise invalid(f"tools[{i}].function.parameters.type", "wanted 'object'")
        if not isinstance(parameters.get("properties", {}), dict):
            raise invalid(f"tools[{i}].function.parameters.properties", "wanted an object")
    if choice in ("required", "any") and not tools:
        raise invalid("tool_choice", f"got {choice!r} without tools; send `tools`, or leave it out")
    if isinstance(choice, ChosenTool):
        _check_chosen(choice, names)


def _check_chosen(choice: ChosenTool, names: set[str]) -> None:
    wanted, other = ("function", "allowed_tools") if choice.type == "function" else ("allowed_tools", "function")
    if getattr(choice, wanted) is None:
        raise invalid(f"tool_choice.{wanted}", f"missing; wanted with type {choice.type!r}")
    if getattr(choice, other) is not None:
        raise invalid(f"tool_choice.{other}", f"wanted with type {other!r}, and with no other")
    if choice.called_name is not None and choice.called_name not in names:
        raise invalid("tool_choice.function.name", f"got {choice.called_name[:80]!r}, which is none of `tools`")
    if choice.allowed_tools is None:
        return
    if not choice.allowed_tools.tools:
        raise invalid("tool_choice.allowed_tools.tools", "empty; wanted at least one, or tool_choice 'none'")
    for i, tool in enumerate(choice.allowed_tools.tools):
        if tool.function.name not in names:
            what = f"got {tool.function.name[:80]!r}, which is none of `tools`"
            raise invalid(f"tool_choice.allowed_tools.tools[{i}].function.name", what)
