"""`/tokenize` and `/detokenize`: what a text is in tokens, and back."""

import msgspec
from fastapi import APIRouter, Request, Response

from server.api_error import invalid
from server.bodies import DetokenizeBody, TokenizeBody, check_messages, read_body
from server.prompts import chat_prompt, check_token_ids, off_loop
from server.service import service_of

router = APIRouter()


@router.post("/tokenize")
async def tokenize(request: Request) -> Response:
    """A prompt (with BOS unless `add_special_tokens` is false) or messages (through the chat template)."""
    service = service_of(request)
    body = await read_body(request, TokenizeBody, service.settings.max_body_mib)
    service.check_model(body.model)
    limits = service.supervisor.ready()
    if (body.prompt is None) == (body.messages is None):
        raise invalid("prompt", "give either prompt or messages, and not both")
    if body.messages is not None:
        check_messages(body.messages)
        token_ids = (await chat_prompt(service, body.messages)).token_ids
    else:
        text = body.prompt or ""
        with_special = body.add_special_tokens is not False
        token_ids = await off_loop(len(text), service.tokenizer.encode, text, with_special)
    return _json({"tokens": token_ids, "count": len(token_ids), "max_model_len": limits.max_context_tokens})


@router.post("/detokenize")
async def detokenize(request: Request) -> Response:
    """The text of token ids, special tokens spelled out."""
    service = service_of(request)
    body = await read_body(request, DetokenizeBody, service.settings.max_body_mib)
    service.check_model(body.model)
    check_token_ids("tokens", body.tokens, service.supervisor.ready().vocab_size)
    text = await off_loop(len(body.tokens), service.tokenizer.decode, body.tokens, False)
    return _json({"prompt": text})


def _json(tree: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
