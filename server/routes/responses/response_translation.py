"""Translate a request of `/v1/responses` to a chat."""

import msgspec

from server.api_error import invalid
from server.bodies.answer_form import JsonSchema, ResponseFormat
from server.bodies.chat_message import CalledFunction, Message, MessageCall, message_text
from server.bodies.chat_tools import AllowedTools, ChosenTool, Function, NamedFunction, NamedTool, Tool
from server.routes.responses.response_bodies import InputItem, ResponsesBody, ToolNamed, name_in
from server.routes.translation import Translation, choose_function, join_parts, start_chat

_NAMES = (
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^tool_choice\.allowed_tools\.tools(\[\d+\])?(\.function)?", r"tool_choice.tools\1"),
    (r"^max_(completion_)?tokens", "max_output_tokens"),
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^messages(?=:|$)", "input"),
)


def translate_response(body: ResponsesBody, earlier: list[Message]) -> Translation:
    """Return the chat of a response that continues the messages `earlier`; the body holds no references to items.

    Raises ApiError 400.
    """
    opening = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    messages, origins = _read_items(body.input)
    if not messages:
        raise invalid("input", "empty; wanted a text, or a list with at least one message")
    chat = start_chat(body, [*opening, *earlier, *messages])
    chat.max_completion_tokens = body.max_output_tokens
    chat.parallel_tool_calls = body.parallel_tool_calls
    chat.prompt_cache_key = body.prompt_cache_key
    chat.reasoning_effort = None if body.reasoning is None else body.reasoning.effort
    chat.tools = [
        Tool(type="function", function=Function(
            name=name_in(tool.namespace, tool.name), description=tool.description, parameters=tool.parameters,
            strict=tool.strict))
        for tool in body.tools or []
    ]  # fmt: skip
    choice = body.tool_choice
    chat.tool_choice = _read_choice(choice) if isinstance(choice, ToolNamed) else choice
    form = None if body.text is None else body.text.format
    if form is not None:
        schema = None
        if form.type == "json_schema":
            schema = JsonSchema(schema=form.schema, name=form.name, description=form.description, strict=form.strict)
        chat.response_format = ResponseFormat(type=form.type, json_schema=schema)
    where = ["instructions"] * len(opening) + ["previous_response_id"] * len(earlier) + origins
    return Translation(chat, tuple(where), _NAMES, tuple(messages), cuts_history=body.truncation == "auto")


def _read_choice(choice: ToolNamed) -> ChosenTool:
    """Return the choice of a chat, without tools that are no functions. Raises ApiError 400."""
    if choice.type == "function":
        if choice.name is None:
            raise invalid("tool_choice.name", "missing; wanted with type 'function'")
        return choose_function(name_in(choice.namespace, choice.name))
    for field in ("mode", "tools"):
        if getattr(choice, field) is None:
            raise invalid(f"tool_choice.{field}", "missing; wanted with type 'allowed_tools'")
    names = [name_in(tool.namespace, tool.name or "") for tool in choice.tools or [] if tool.type == "function"]
    tools = [NamedTool(type="function", function=NamedFunction(name=name)) for name in names]
    return ChosenTool(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=tools))


def _read_items(given: str | list[InputItem]) -> tuple[list[Message], list[str]]:
    """Return the messages of the items, and their paths. Calls in a row and reasoning before them are one message."""
    if isinstance(given, str):
        return [Message(role="user", content=given)], ["input"]
    messages: list[Message] = []
    origins: list[str] = []
    thought: str | None = None
    for i, item in enumerate(given):
        at = f"input[{i}]"
        match item.type or "message":
            case "reasoning":
                thought = message_text(Message(role="assistant", content=join_parts(item.content)))
                continue
            case "function_call":
                call = _call_of(at, item)
                last = messages[-1] if messages else None
                if last is not None and last.role == "assistant" and thought is None:
                    messages[-1] = msgspec.structs.replace(last, tool_calls=[*(last.tool_calls or []), call])
                    continue
                message = Message(role="assistant", content="", tool_calls=[call], reasoning_content=thought)
            case "function_call_output":
                if item.call_id is None or item.output is None:
                    raise invalid(f"{at}.{'call_id' if item.call_id is None else 'output'}", "missing")
                message = Message(role="tool", content=join_parts(item.output), tool_call_id=item.call_id)
            case _:
                if item.role is None or item.content is None:
                    raise invalid(f"{at}.{'role' if item.role is None else 'content'}", "missing")
                is_own = item.role == "assistant"
                message = Message(
                    role=item.role, content=join_parts(item.content), reasoning_content=thought if is_own else None
                )
        thought = None
        messages.append(message)
        origins.append(at)
    return messages, origins


def _call_of(at: str, item: InputItem) -> MessageCall:
    for field in ("call_id", "name", "arguments"):
        if getattr(item, field) is None:
            raise invalid(f"{at}.{field}", "missing")
    function = CalledFunction(name=name_in(item.namespace, item.name or ""), arguments=item.arguments or "")
    return MessageCall(id=item.call_id or "", type="function", function=function)
