"""Serve Anthropic's `/v1/messages`, and the count of a prompt's tokens."""

from starlette.responses import Response

from server.bodies.generation_bodies import check_chat
from server.bodies.schema_limits import Tree
from server.generation.prompt_tokens import chat_prompt, profile_of
from server.prompting.plain_chat import read_conversation
from server.routes.generate import respond
from server.routes.messages.message_answers import AnsweredMessage, InputTokens, MessageError, MessageEvent
from server.routes.messages.message_bodies import COUNT_TOKENS, MESSAGES, CountTokensBody, MessagesBody
from server.routes.messages.message_shape import MessageShape
from server.routes.messages.message_translation import translate_messages
from server.routes.route import BODY_ERRORS, ENGINE_ERRORS, Call, Route
from server.routes.translation import generate_chat


async def create_message(call: Call[MessagesBody]) -> Response:
    translated = translate_messages(call.body)
    generation = await generate_chat(call, translated, "msg", "messages")
    return await respond(call, translated.chat, generation, MessageShape(generation, call.service.model_name))


async def count_tokens(call: Call[CountTokensBody]) -> Tree:
    service, translated = call.service, translate_messages(call.body)
    with translated.renaming_errors():
        check_chat(translated.chat)
        conversation = service.left_out.clean(read_conversation(translated.chat))
        limits = service.supervisor.ready()
        context = limits.profiles[profile_of(translated.chat, limits)]
        async with service.texts.one_at_a_time(conversation.num_chars):
            prompt = await chat_prompt(service, conversation, context)
    return {"input_tokens": len(prompt.token_ids)}


_HELLO = [{"role": "user", "content": "Hello!"}]
ROUTES = (
    Route(
        "post",
        "/v1/messages",
        create_message,
        "Answer Anthropic's clients",
        AnsweredMessage,
        MESSAGES,
        {"messages": _HELLO, "max_tokens": 32},
        MessageEvent,
        ENGINE_ERRORS,
        MessageError,
    ),
    Route(
        "post",
        "/v1/messages/count_tokens",
        count_tokens,
        "Tokens of such a prompt",
        InputTokens,
        COUNT_TOKENS,
        {"messages": _HELLO},
        errors=BODY_ERRORS,
        error=MessageError,
    ),
)
