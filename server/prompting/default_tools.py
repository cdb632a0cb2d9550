"""Write tools for a chat template that writes none: in a system message, with calls and results in turns of text.

The form is Hermes's, which `gpu/model/answers/hermes.py` declares:

    # Tools

    You may call functions to help with the user's request. Their signatures are in <tools></tools>:
    <tools>
    {"type": "function", "function": {"name": ..., "description": ..., "parameters": ...}}
    </tools>

    For each call, write a JSON object with the function's name and arguments in <tool_call></tool_call>:
    <tool_call>
    {"name": ..., "arguments": ...}
    </tool_call>

It goes behind the system message that there is; into one of its own, if there is none; before the first message, where
the template drops or refuses system messages. Calls are written as above behind what the assistant said; results, one
or several in a row, as a message of the user:

    <tool_response>
    RESULT
    </tool_response>
"""

from dataclasses import replace

import msgspec

from server.bodies.chat_message import Message, message_text
from server.parsing.response_template import encode_json
from server.prompting.plain_chat import Conversation, Tree, read_arguments

_INTRODUCTION = (
    "# Tools\n\nYou may call functions to help with the user's request. Their signatures are in <tools></tools>:\n"
    "<tools>\n{tools}\n</tools>\n\nFor each call, write a JSON object with the function's name and arguments in "
    '<tool_call></tool_call>:\n<tool_call>\n{{"name": <function-name>, "arguments": <arguments-object>}}\n</tool_call>'
)


def write_tools(conversation: Conversation, takes_system: bool) -> Conversation:
    """Return the chat without tools, calls and results that a template would have to know."""
    messages = write_calls(write_results(conversation.messages))
    if conversation.tools:
        tools = "\n".join(map(encode_json, conversation.tools))
        messages = _introduce(_INTRODUCTION.format(tools=tools), messages, takes_system)
    return replace(conversation, messages=messages, tools=[])


def write_results(messages: list[Message]) -> list[Message]:
    """Return the messages with results of tools as what the user says."""
    written: list[Message] = []
    results: list[str] = []
    for message in messages:
        if message.role == "tool":
            results.append(f"<tool_response>\n{message_text(message)}\n</tool_response>")
            continue
        written += _as_user(results)
        results = []
        written.append(message)
    return written + _as_user(results)


def write_calls(messages: list[Message]) -> list[Message]:
    """Return the messages with calls as what the assistant says."""
    return [_with_calls(message) for message in messages]


def write_observations(messages: list[Tree]) -> list[Tree]:
    """Return calls and results as templates of ChatGLM and GLM-4 have them.

    A call is a message of the assistant's whose `metadata` is the tool's name; a result is a message of the role
    `observation`.
    """
    written: list[Tree] = []
    for message in messages:
        if message["role"] == "tool":
            written.append({"role": "observation", "content": message["content"]})
            continue
        calls = message.get("tool_calls", [])
        if message["content"] or not calls:
            written.append({key: value for key, value in message.items() if key != "tool_calls"})
        for call in calls:
            name, arguments = call["function"]["name"], call["function"]["arguments"]
            written.append({"role": "assistant", "metadata": name, "content": encode_json(arguments)})
    return written


def _introduce(text: str, messages: list[Message], takes_system: bool) -> list[Message]:
    first = messages[0]
    if first.role == "system":
        return [msgspec.structs.replace(first, content=f"{message_text(first)}\n\n{text}"), *messages[1:]]
    if first.role == "user" and not takes_system:
        return [msgspec.structs.replace(first, content=f"{text}\n\n{message_text(first)}"), *messages[1:]]
    return [Message(role="system" if takes_system else "user", content=text), *messages]


def _as_user(results: list[str]) -> list[Message]:
    return [Message(role="user", content="\n".join(results))] if results else []


def _with_calls(message: Message) -> Message:
    if not message.tool_calls:
        return message
    called = [(call.function.name, read_arguments(call.function.arguments)) for call in message.tool_calls]
    calls = [
        f"<tool_call>\n{encode_json({'name': name, 'arguments': arguments})}\n</tool_call>"
        for name, arguments in called
    ]
    said = message_text(message)
    return msgspec.structs.replace(message, content="\n".join([*([said] if said else []), *calls]), tool_calls=None)
