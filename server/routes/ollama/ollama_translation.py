"""Translate requests of `/api/chat` and `/api/generate` to a chat, or to a text that is continued."""

import msgspec

from server.api_error import invalid
from server.bodies.answer_form import JsonSchema, ResponseFormat
from server.bodies.chat_message import CalledFunction, Message, MessageCall, message_text
from server.bodies.generation_bodies import ChatBody, CompletionBody, GenerationBody
from server.routes.ollama.ollama_bodies import (
    OllamaBody,
    OllamaChatBody,
    OllamaGenerateBody,
    OllamaMessage,
    Options,
)
from server.routes.translation import Translation

JSON_FORM = "json"
NAMES = (
    (r"^repetition_penalty", "options.repeat_penalty"),
    (r"^(temperature|top_k|top_p|min_p|seed|stop|presence_penalty|frequency_penalty)(?=:|$)", r"options.\1"),
    (r"^response_format(\.json_schema\.schema|\.json_schema)?", "format"),
)


def translate_chat(body: OllamaChatBody) -> Translation:
    """Return the chat of a body with messages. Raises ApiError 400."""
    messages = read_messages(body.messages or [])
    chat = ChatBody(messages=messages)
    chat.tools = [tool if tool.type else msgspec.structs.replace(tool, type="function") for tool in body.tools or []]
    last = messages[-1]
    if last.role == "assistant" and not last.tool_calls and message_text(last):
        chat.continue_final_message, chat.add_generation_prompt = True, False
    origins = [f"messages[{i}]" for i in range(len(messages))]
    return _finish(body, chat, origins, messages)


def translate_prompt(body: OllamaGenerateBody) -> Translation:
    """Return a prompt as a chat of one turn."""
    messages = [] if not body.system else [Message(role="system", content=body.system)]
    messages.append(Message(role="user", content=body.prompt or ""))
    return _finish(body, ChatBody(messages=messages), ["system", "prompt"][-len(messages) :], messages)


def translate_text(body: OllamaGenerateBody) -> CompletionBody:
    """Return a prompt that is continued as it is. Raises ApiError 400."""
    if body.system:
        raise invalid("system", "a raw prompt has none; write it in the prompt, or leave `raw` out")
    return translate_settings(body, body.prompt or "")


def translate_settings(body: OllamaBody, prompt: str = "") -> CompletionBody:
    """Return what a body says beside its prompt, or its messages. Raises ApiError 400."""
    completion = CompletionBody(prompt=prompt)
    _take_shared(body, completion)
    return completion


def _finish(body: OllamaBody, chat: ChatBody, origins: list[str], messages: list[Message]) -> Translation:
    _take_shared(body, chat)
    if body.think is not None:
        efforts = {True: "medium", False: "none"}
        chat.reasoning_effort = efforts[body.think] if isinstance(body.think, bool) else body.think  # type: ignore[assignment]
    return Translation(chat, tuple(origins), NAMES, tuple(messages), most_tokens=asked_tokens(body))


def asked_tokens(body: OllamaBody) -> int | None:
    """Return the most tokens of the answer, None if the context alone limits it."""
    asked = None if body.options is None else body.options.num_predict
    return asked if asked is not None and asked > 0 else None


def _take_shared(body: OllamaBody, to: GenerationBody) -> None:
    """Take over what both bodies have. Raises ApiError 400 for a form that is none."""
    options = body.options or Options()
    to.model = body.model
    to.stream = body.stream is not False
    to.temperature, to.top_k, to.top_p, to.min_p = options.temperature, options.top_k, options.top_p, options.min_p
    to.seed, to.stop, to.repetition_penalty = options.seed, options.stop, options.repeat_penalty
    to.presence_penalty, to.frequency_penalty = options.presence_penalty, options.frequency_penalty
    to.attention_profile, to.attention_epsilon = body.attention_profile, body.attention_epsilon
    to.cache_salt = body.cache_salt
    to.priority, to.max_seconds = body.priority, body.max_seconds
    if isinstance(body.format, dict):
        to.response_format = ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=body.format))
    elif body.format == JSON_FORM:
        to.response_format = ResponseFormat(type="json_object")
    elif body.format:
        raise invalid("format", f"got {body.format[:80]!r}, wanted '{JSON_FORM}' or a JSON schema")


def read_messages(given: list[OllamaMessage]) -> list[Message]:
    """Return the messages of a chat, whose calls have ids and whose results name them. Raises ApiError 400."""
    messages: list[Message] = []
    waiting: list[MessageCall] = []  # calls without a result so far
    for i, message in enumerate(given):
        calls = []
        for j, call in enumerate(message.tool_calls or ()):
            arguments = msgspec.json.encode(call.function.arguments).decode()
            function = CalledFunction(name=call.function.name, arguments=arguments)
            calls.append(MessageCall(id=call.id or f"call{i:04d}{j}"[:9], type="function", function=function))
        waiting += calls
        answered = _take_answered(f"messages[{i}]", message, waiting) if message.role == "tool" else None
        messages.append(
            Message(
                role=message.role,
                content=message.content or "",
                tool_calls=calls or None,
                tool_call_id=answered,
                reasoning_content=message.thinking or None,
            )
        )
    return messages


def _take_answered(at: str, message: OllamaMessage, waiting: list[MessageCall]) -> str:
    """Take from the waiting calls the one that a result answers, found by its id, by its tool, or by its order."""
    for call in waiting:
        if message.tool_call_id is not None:
            is_it = call.id == message.tool_call_id
        else:
            is_it = message.tool_name is None or call.function.name == message.tool_name
        if is_it:
            waiting.remove(call)
            return call.id
    named = message.tool_call_id or message.tool_name
    of_what = "" if named is None else f" of {named[:80]!r}"
    raise invalid(at, f"the result{of_what} answers no call before it that has none yet")
