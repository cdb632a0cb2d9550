"""`/v1/documents`: texts that are left here once, by an API key, and named in its chats from then on.

A new one is cut into chunks, whose keys and values the engine computes and stores behind requests. A document that is
deleted is named no more, and those of its chunks that no other has leave the store.
"""

import sys
from collections.abc import Sequence

import msgspec
from fastapi import APIRouter, Request, Response

from scheduler.messages import ChunksStored, Ready
from server.api_error import ApiError, invalid, too_long
from server.bodies.body_reader import read_body
from server.bodies.chat_message import Message, check_messages, message_text
from server.bodies.generation_bodies import DocumentBody
from server.service.service import Service, join_salts, service_of
from server.stores.document_registry import DocumentEntry
from server.stores.document_texts import DOCUMENTS_OFF, Documents, name_chunks, unknown_document
from server.text.chunker import Chunks, count_tokens
from server.text.model_tokenizer import TooManyTokens
from server.text.text_pool import INLINE_CHARS

MAX_PAGE = 1000
DEFAULT_PAGE = 100

router = APIRouter()


@router.post("/v1/documents")
async def add_document(request: Request) -> Response:
    """Store a text and its chunks. The same title and text again are the same document."""
    service = service_of(request)
    documents = _documents_of(service)
    body = await read_body(request, DocumentBody, service.body_room, service.texts, service.settings)
    service.check_model(body.model)
    limits = service.supervisor.ready()
    text = _text_of(body)
    async with service.texts.aside(INLINE_CHARS + len(text)):
        chunks = await _cut(service, documents, text, limits)
    if not chunks:
        raise invalid("text", "empty; wanted at least one token")
    salt = join_salts(request.state.cache_salt, body.cache_salt)
    named = name_chunks(chunks, salt)
    entry = await documents.registry.add(request.state.document_owner, body.title or "", text, True, named)
    await count_documents(service)
    storing = service.supervisor.store_chunks([chunk.tobytes() for chunk in chunks], salt)
    stored = await storing if body.wait is not False else None
    if isinstance(stored, ApiError):
        raise stored
    counts = {"num_tokens": count_tokens(chunks), "num_chunks": len(chunks)}
    return _json(_describe(entry) | counts | _report(stored))


@router.get("/v1/documents")
async def list_documents(request: Request) -> Response:
    """A page of the key's documents, oldest first."""
    documents = _documents_of(service_of(request))
    limit, after = _limit_of(request.query_params.get("limit")), request.query_params.get("after")
    found = await documents.registry.page(request.state.document_owner, after, limit + 1)
    if found is None:
        raise unknown_document("after", after or "")
    data = [_describe(entry) for entry in found[:limit]]
    return _json({"object": "list", "data": data, "has_more": len(found) > limit})


@router.get("/v1/documents/{document_id}")
async def show_document(request: Request, document_id: str) -> Response:
    documents = _documents_of(service_of(request))
    found = await documents.registry.find(request.state.document_owner, [document_id], sys.maxsize)
    if document_id not in found:
        raise unknown_document("document_id", document_id)
    document = found[document_id]
    return _json(_describe(document.entry) | {"text": document.text})


@router.delete("/v1/documents/{document_id}")
async def delete_document(request: Request, document_id: str) -> Response:
    service = service_of(request)
    documents = _documents_of(service)
    unnamed = await documents.registry.delete(request.state.document_owner, document_id)
    if unnamed is None:
        raise unknown_document("document_id", document_id)
    service.supervisor.drop_chunks(unnamed)  # before anything is awaited: who leaves the text again comes after
    await count_documents(service)
    return _json({"id": document_id, "object": "document.deleted", "deleted": True})


async def count_documents(service: Service) -> None:
    """For the metrics. Other processes that share the file are heard of now and then, this way."""
    if service.documents is not None:
        service.metrics.documents.set(await service.documents.registry.count())


def write_messages(messages: Sequence[Message]) -> str:
    """Messages as one text, each with who says it, calls as `name(arguments)` on lines of their own."""
    return "\n\n".join(f"{message.name or message.role}: {_write_said(message)}" for message in messages)


def _write_said(message: Message) -> str:
    calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []]
    return "\n".join(filter(None, [message_text(message), *calls]))


def _documents_of(service: Service) -> Documents:
    if service.documents is None:
        raise ApiError(404, f"documents: {DOCUMENTS_OFF}", code="documents_off")
    return service.documents


def _text_of(body: DocumentBody) -> str:
    if (body.text is None) == (body.messages is None):
        raise invalid("text", "give either text or messages, and not both")
    if body.messages is None:
        return body.text or ""
    check_messages(body.messages)
    return write_messages(body.messages)


def _limit_of(given: str | None) -> int:
    if given is None:
        return DEFAULT_PAGE
    if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= MAX_PAGE):
        raise invalid("limit", f"got {given[:80]!r}, wanted from 1 to {MAX_PAGE}")
    return int(given)


async def _cut(service: Service, documents: Documents, text: str, limits: Ready) -> Chunks:
    """Of a text that some prompt has room for; a thread's work. Raises ApiError 400."""
    context = limits.max_context_tokens
    try:
        return await service.texts.run(INLINE_CHARS + len(text), documents.chunker.cut, text, context)
    except TooManyTokens as error:
        raise too_long("text", f"at least {error.num_tokens} tokens, a prompt has room for {context}") from None


def _describe(entry: DocumentEntry) -> dict[str, object]:
    return {
        "id": entry.id,
        "object": "document",
        "title": entry.title,
        "content_hash": entry.content_hash,
        "num_bytes": entry.num_bytes,
        "created": int(entry.created),
    }


def _report(stored: ChunksStored | None) -> dict[str, object]:
    if stored is None:
        return {"num_stored": None, "num_known": None, "reason": None}
    return {"num_stored": stored.num_stored, "num_known": stored.num_known, "reason": stored.reason or None}


def _json(tree: dict[str, object]) -> Response:
    return Response(msgspec.json.encode(tree), media_type="application/json")
