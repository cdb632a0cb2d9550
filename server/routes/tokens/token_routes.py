"""`/tokenize` and `/detokenize`: what a text is in tokens, and back. A thread for long texts is left to prompts."""

from dataclasses import replace

import msgspec
from fastapi import APIRouter, Request, Response

from server.api_error import invalid
from server.bodies.body_reader import read_body
from server.bodies.chat_message import check_messages
from server.bodies.chat_tools import check_tools
from server.bodies.generation_bodies import DetokenizeBody, TokenizeBody, check_continued
from server.generation.prompt_tokens import chat_prompt, check_token_ids, check_variables
from server.prompting.conversation import read_conversation
from server.service.service import service_of
from server.text.text_pool import INLINE_CHARS

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """A prompt (with BOS unless `add_special_tokens` is false) or messages (through the chat template)."""
    service = service_of(request)
    body = await read_body(request, TokenizeBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    limits = service.supervisor.ready()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages, and not both")
    if body.messages is not None:
        check_messages(body.messages)
        check_tools(body.tools or [], None)
        check_continued(body, body.messages)
        check_variables(service, body.chat_template_kwargs or {})
        conversation = replace(read_conversation(body.as_chat()), begins_answer=body.add_generation_prompt is not False)
        size = INLINE_CHARS + conversation.num_chars  # never inline, as there
        async with service.texts.aside(size):
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
        if len(text) > service.settings.max_tokenize_kib * 1024:
            most = service.settings.max_tokenize_kib
            raise invalid("prompt", f"{len(text)} characters, at most {most} Ki (server.max_tokenize_kib)")
        with_special = body.add_special_tokens is not False
        async with service.texts.aside(len(text)):
            token_ids = await service.texts.run(len(text), service.tokenizer.encode, text, with_special)
    return _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": limits.max_context_tokens})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens spelled out."""
    service = service_of(request)
    body = await read_body(request, DetokenizeBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    limits, most = service.supervisor.ready(), service.settings.max_tokenize_kib
    if len(body.tokens) > most * 1024:
        raise invalid("tokens", f"{len(body.tokens)} ids, at most {most} Ki (server.max_tokenize_kib)")
    check_token_ids("tokens", body.tokens, limits.vocab_size)
    async with service.texts.aside(len(body.tokens)):
        text = await service.texts.run(len(body.tokens), service.tokenizer.decode, body.tokens, False)
    return _json({"prompt": text})


def _json(tree: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
