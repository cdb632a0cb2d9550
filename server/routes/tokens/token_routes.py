"""Serve `/tokenize` and `/detokenize`. A long text takes one thread at most, so that prompts keep another."""

from dataclasses import replace

from server.api_error import invalid
from server.bodies.chat_message import check_messages
from server.bodies.chat_tools import check_tools
from server.bodies.generation_bodies import check_continued
from server.bodies.schema_limits import Tree
from server.generation.prompt_tokens import chat_prompt, check_token_ids, check_variables
from server.prompting.plain_chat import read_conversation
from server.routes.answer import Answer, Count
from server.routes.route import BODY_ERRORS, Call, Route
from server.routes.tokens.token_bodies import DETOKENIZE, TOKENIZE, DetokenizeBody, TokenizeBody
from server.text.text_pool import INLINE_CHARS


class Tokens(Answer):
    tokens: list[int]
    count: Count
    max_model_len: Count


class Text(Answer):
    prompt: str


async def tokenize(call: Call[TokenizeBody]) -> Tree:
    """Return the tokens of a prompt, with BOS unless `add_special_tokens` is false, or of messages as in a chat."""
    service, body = call.service, call.body
    limits = service.supervisor.ready()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages, and not both")
    if body.messages is not None:
        check_messages(body.messages)
        check_tools(body.tools or [], None)
        check_continued(body.continue_final_message, body.add_generation_prompt, body.messages)
        check_variables(service, body.chat_template_kwargs or {})
        read = service.left_out.clean(read_conversation(body.as_chat()))
        conversation = replace(read, begins_answer=body.add_generation_prompt is not False)
        size = INLINE_CHARS + conversation.num_chars  # never inline, as in chats
        async with service.texts.one_at_a_time(size):
            token_ids = (await chat_prompt(service, conversation, limits.max_context_tokens)).token_ids
    else:
        asked = {
            "continue_final_message": body.continue_final_message,
            "add_generation_prompt": body.add_generation_prompt is False,
            "tools": body.tools,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        of_messages = next((name for name, value in asked.items() if value), None)
        if of_messages is not None:
            raise invalid(of_messages, "only with messages")
        text = body.prompt or ""
        if len(text) > service.max_tokenize_items:
            most = service.settings.max_tokenize_kib
            raise invalid("prompt", f"{len(text)} characters, at most {most} Ki (server.max_tokenize_kib)")
        with_special = body.add_special_tokens is not False
        async with service.texts.one_at_a_time(len(text)):
            token_ids = await service.texts.run(len(text), service.tokenizer.encode, text, with_special)
    return {"tokens": token_ids, "count": len(token_ids), "max_model_len": limits.max_context_tokens}


async def detokenize(call: Call[DetokenizeBody]) -> Tree:
    """Return the text of token ids, special tokens spelled out."""
    service, body = call.service, call.body
    limits, most = service.supervisor.ready(), service.settings.max_tokenize_kib
    if len(body.tokens) > service.max_tokenize_items:
        raise invalid("tokens", f"{len(body.tokens)} ids, at most {most} Ki (server.max_tokenize_kib)")
    check_token_ids("tokens", body.tokens, limits.vocab_size)
    async with service.texts.one_at_a_time(len(body.tokens)):
        text = await service.texts.run(len(body.tokens), service.tokenizer.decode, body.tokens, False)
    return {"prompt": text}


ROUTES = (
    Route(
        "post",
        "/tokenize",
        tokenize,
        "A text or messages in tokens",
        Tokens,
        TOKENIZE,
        {"prompt": "Hello!"},
        errors=BODY_ERRORS,
    ),
    Route(
        "post",
        "/detokenize",
        detokenize,
        "Tokens as a text",
        Text,
        DETOKENIZE,
        {"tokens": [1, 2, 3]},
        errors=BODY_ERRORS,
    ),
)
