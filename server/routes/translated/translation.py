"""`/v1/responses` and `/v1/messages` as chats: their requests, and the names by which errors of chats are told to them.

There is one engine path, that of chats. Knows no engine and no shape of an answer.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import msgspec

from server.api_error import ApiError, NoRoom, PromptTooLong, invalid
from server.bodies.answer_form import JsonSchema, ResponseFormat
from server.bodies.chat_message import CalledFunction, Message, MessageCall, Part, join_texts, message_text
from server.bodies.chat_tools import AllowedTools, ChosenTool, Function, NamedFunction, NamedTool, Tool
from server.bodies.generation_bodies import ChatBody
from server.bodies.translated_bodies import (
    CallBlock,
    InputItem,
    InputPart,
    MessagesBody,
    OtherBody,
    OutputConfig,
    PromptBody,
    ResponsesBody,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    ToolNamed,
    Turn,
    name_in,
)

_RESPONSES_NAMES = [
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^tool_choice\.allowed_tools\.tools(\[\d+\])?(\.function)?", r"tool_choice.tools\1"),
    (r"^max_(completion_)?tokens", "max_output_tokens"),
    (r"^response_format\.json_schema", "text.format"),
    (r"^response_format", "text.format"),
    (r"^messages(?=:|$)", "input"),
]
_MESSAGES_NAMES = [
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^max_completion_tokens", "max_tokens"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^stop(?=:|$)", "stop_sequences"),
    (r"^stream_options", "stream"),
]


@dataclass(frozen=True, slots=True)
class Translation:
    """A request as a chat. `origins[i]`: where message i of the chat stood. `new_messages`: those of this request
    alone, less the instructions, which a later request does not take over.
    """

    chat: ChatBody
    origins: list[str]
    names: list[tuple[str, str]]
    new_messages: list[Message]

    @contextmanager
    def naming(self) -> Iterator[None]:
        """Errors of the chat name the fields that were sent."""
        try:
            yield
        except ApiError as error:
            if error.param is None:
                raise
            renamed = self._rename(error.param)
            message = renamed + error.message.removeprefix(error.param)
            if isinstance(error, NoRoom | PromptTooLong) and self.names is _MESSAGES_NAMES:
                message = error.anthropic_message  # its clients read the numbers, and ask again for less
            raise ApiError(error.status, message, param=renamed, code=error.code, headers=error.headers) from None

    def _rename(self, param: str) -> str:
        found = re.match(r"messages\[(\d+)\]", param)
        if found is not None:
            return self.origins[int(found[1])]
        for pattern, name in self.names:
            param = re.sub(pattern, name, param)
        return param


def _chat(body: OtherBody, messages: list[Message]) -> ChatBody:
    return ChatBody(
        messages=messages,
        model=body.model,
        temperature=body.temperature,
        top_p=body.top_p,
        stream=body.stream,
        attention_profile=body.attention_profile,
        cache_salt=body.cache_salt,
        priority=body.priority,
        max_seconds=body.max_seconds,
    )


# --- /v1/responses ----------------------------------------------------------------------------------------------------


def translate_response(body: ResponsesBody, earlier: list[Message]) -> Translation:
    """`earlier`: what was said up to the response that this one follows; the body holds no reference to an item. Raises
    ApiError 400.
    """
    opening = [] if body.instructions is None else [Message(role="system", content=body.instructions)]
    messages, origins = _read_items(body.input)
    if not messages:
        raise invalid("input", "empty; wanted a text, or a list with at least one message")
    chat = _chat(body, [*opening, *earlier, *messages])
    chat.max_completion_tokens = body.max_output_tokens
    chat.parallel_tool_calls = body.parallel_tool_calls
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
    return Translation(chat, where, _RESPONSES_NAMES, messages)


def _read_choice(choice: ToolNamed) -> ChosenTool:
    """Raises ApiError 400. Tools of other types than functions are not offered, and so not allowed either."""
    if choice.type == "function":
        if choice.name is None:
            raise invalid("tool_choice.name", "missing; wanted with type 'function'")
        return _named(name_in(choice.namespace, choice.name))
    for field in ("mode", "tools"):
        if getattr(choice, field) is None:
            raise invalid(f"tool_choice.{field}", "missing; wanted with type 'allowed_tools'")
    names = [name_in(tool.namespace, tool.name or "") for tool in choice.tools or [] if tool.type == "function"]
    tools = [NamedTool(type="function", function=NamedFunction(name=name)) for name in names]
    return ChosenTool(type="allowed_tools", allowed_tools=AllowedTools(mode=choice.mode or "auto", tools=tools))


def _read_items(given: str | list[InputItem]) -> tuple[list[Message], list[str]]:
    """Calls that follow one another are one message's, and the thought before them is theirs."""
    if isinstance(given, str):
        return [Message(role="user", content=given)], ["input"]
    messages: list[Message] = []
    origins: list[str] = []
    thought: str | None = None
    for i, item in enumerate(given):
        at = f"input[{i}]"
        match item.type or "message":
            case "reasoning":
                thought = message_text(Message(role="assistant", content=_content(item.content)))
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
                message = Message(role="tool", content=_content(item.output), tool_call_id=item.call_id)
            case _:
                if item.role is None or item.content is None:
                    raise invalid(f"{at}.{'role' if item.role is None else 'content'}", "missing")
                is_own = item.role == "assistant"
                message = Message(
                    role=item.role, content=_content(item.content), reasoning_content=thought if is_own else None
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


def _content(content: str | list[InputPart] | list[TextBlock] | None) -> str | list[Part]:
    return join_texts([part.text for part in content]) if isinstance(content, list) else content or ""


# --- /v1/messages -----------------------------------------------------------------------------------------------------


def translate_messages(body: PromptBody) -> Translation:
    """Raises ApiError 400."""
    messages: list[Message] = []
    origins: list[str] = []
    if body.system is not None:
        messages.append(Message(role="system", content=_content(body.system)))
        origins.append("system")
    for i, turn in enumerate(body.messages):
        read = _read_turn(f"messages[{i}]", turn)
        messages += [message for message, _ in read]
        origins += [at for _, at in read]
    begun = messages[-1] if messages[-1].role == "assistant" and not messages[-1].tool_calls else None
    if begun is not None and len(messages) > 1 and not (message_text(begun) or begun.reasoning_content):
        begun = None  # an empty turn says nothing of the one that is asked for
        del messages[-1], origins[-1]
    chat = _chat(body, messages)
    chat.tools = [
        Tool(type="function", function=Function(
            name=tool.name, description=tool.description, parameters=tool.input_schema, strict=tool.strict))
        for tool in body.tools or []
    ]  # fmt: skip
    choice = body.tool_choice
    if choice is not None:
        if (choice.type == "tool") != (choice.name is not None):
            raise invalid("tool_choice.name", "wanted with type 'tool', and with no other")
        kinds = {"auto": "auto", "any": "required", "none": "none"}
        chat.tool_choice = _named(choice.name) if choice.name is not None else kinds[choice.type]  # type: ignore[assignment]
        chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None
    config = body.output_config or OutputConfig()
    chat.reasoning_effort = config.effort
    if body.thinking is not None:
        chat.reasoning_effort = "none" if body.thinking.type == "disabled" else config.effort or "medium"
    if config.format is not None:
        chat.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=config.format.schema))
    if begun is not None and message_text(begun):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    if isinstance(body, MessagesBody):
        chat.max_completion_tokens = body.max_tokens
        chat.stop = body.stop_sequences
        chat.top_k = body.top_k
    return Translation(chat, origins, _MESSAGES_NAMES, messages)


def _read_turn(at: str, turn: Turn) -> list[tuple[Message, str]]:
    """A message, and before it one for each result of a call; with where each stood."""
    if isinstance(turn.content, str):
        return [(Message(role=turn.role, content=turn.content), at)]
    found: list[tuple[Message, str]] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[MessageCall] = []
    for j, block in enumerate(turn.content):
        where = f"{at}.content[{j}]"
        match block:
            case TextBlock():
                texts.append(block.text)
            case ResultBlock() if turn.role == "user":
                text = _content(block.content)
                found.append((Message(role="tool", content=text, tool_call_id=block.tool_use_id), where))
            case CallBlock() if turn.role == "assistant":
                arguments = msgspec.json.encode(block.input).decode()
                function = CalledFunction(name=block.name, arguments=arguments)
                calls.append(MessageCall(id=block.id, type="function", function=function))
            case ThinkingBlock() if turn.role == "assistant":
                thoughts.append(block.thinking)
            case _:
                raise invalid(where, f"no block that {turn.role!r} can say")
    if texts or calls or thoughts or not found:
        message = Message(
            role=turn.role,
            content=join_texts(texts),
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )
        found.append((message, at))
    return found


def _named(name: str) -> ChosenTool:
    return ChosenTool(type="function", function=NamedFunction(name=name))
