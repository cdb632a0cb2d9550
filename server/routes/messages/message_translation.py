"""Translate a request of `/v1/messages` to a chat."""

import msgspec

from server.api_error import invalid
from server.bodies.answer_form import JsonSchema, ResponseFormat
from server.bodies.chat_message import CalledFunction, Message, MessageCall, join_texts, message_text
from server.bodies.chat_tools import Function, Tool
from server.generation.session_name import session_in_user_id
from server.routes.messages.message_bodies import (
    CallBlock,
    MessagesBody,
    OutputConfig,
    PromptBody,
    ResultBlock,
    TextBlock,
    ThinkingBlock,
    Turn,
)
from server.routes.translation import Translation, choose_function, join_parts, start_chat

_NAMES = (
    (r"^tools\[(\d+)\]\.function\.parameters", r"tools[\1].input_schema"),
    (r"^tools\[(\d+)\]\.function", r"tools[\1]"),
    (r"^tool_choice\.function", "tool_choice"),
    (r"^max_completion_tokens", "max_tokens"),
    (r"^response_format(\.json_schema)?", "output_config.format"),
    (r"^stop(?=:|$)", "stop_sequences"),
    (r"^stream_options", "stream"),
)


def translate_messages(body: PromptBody) -> Translation:
    """Return the chat of a body. Raises ApiError 400."""
    messages: list[Message] = []
    origins: list[str] = []
    if body.system is not None:
        messages.append(Message(role="system", content=join_parts(body.system)))
        origins.append("system")
    for i, turn in enumerate(body.messages):
        read = _read_turn(f"messages[{i}]", turn)
        messages += [message for message, _ in read]
        origins += [at for _, at in read]
    begun = messages[-1] if messages[-1].role == "assistant" and not messages[-1].tool_calls else None
    if begun is not None and len(messages) > 1 and not (message_text(begun) or begun.reasoning_content):
        begun = None  # an empty turn says nothing of the one that is asked for
        del messages[-1], origins[-1]
    chat = start_chat(body, messages)
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
        chat.tool_choice = choose_function(choice.name) if choice.name is not None else kinds[choice.type]  # type: ignore[assignment]
        chat.parallel_tool_calls = False if choice.disable_parallel_tool_use else None
    if body.metadata is not None and body.metadata.user_id:
        chat.prompt_cache_key = session_in_user_id(body.metadata.user_id)
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
    return Translation(chat, tuple(origins), _NAMES, tuple(messages), tells_anthropic=True)


def _read_turn(at: str, turn: Turn) -> list[tuple[Message, str]]:
    """Return a turn's message, after one for each result of a call, each with its path. Raises ApiError 400."""
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
                text = join_parts(block.content)
                found.append((Message(role="tool", content=text, tool_call_id=block.tool_use_id), where))
            case CallBlock() if turn.role == "assistant":
                arguments = msgspec.json.encode(block.input).decode()
                function = CalledFunction(name=block.name, arguments=arguments)
                calls.append(MessageCall(id=block.id, type="function", function=function))
            case ThinkingBlock() if turn.role == "assistant":
                thoughts.append(block.thinking)
            case _:
                raise invalid(where, f"a message of {turn.role!r} cannot have a block of this type")
    if texts or calls or thoughts or not found:
        message = Message(
            role=turn.role,
            content=join_texts(texts),
            tool_calls=calls or None,
            reasoning_content="".join(thoughts) or None,
        )
        found.append((message, at))
    return found
