"""Serve `/v1/documents`: store, list, show and delete the documents of an API key, which its chats then name.

A new document is cut into chunks, whose keys and values the engine computes and stores behind requests. When a document
is deleted, those of its chunks that no other document has leave the store.
"""

import sys
from collections.abc import Sequence
from typing import Any

from scheduler.messages import ChunksStored, Ready
from server.api_error import ApiError, invalid, too_long
from server.bodies.chat_message import Message, check_messages, message_text
from server.bodies.generation_bodies import DOCUMENT_ID, DOCUMENTS_OFF
from server.bodies.schema_limits import BodyLimits, Tree
from server.routes.documents.document_answers import DeletedDocument, DocumentList, NewDocument, WholeDocument
from server.routes.documents.document_bodies import DOCUMENT, DocumentBody
from server.routes.route import (
    BODY_ERRORS,
    READ_ERRORS,
    Call,
    Route,
    page_parameter,
    path_parameter,
    query_parameter,
)
from server.service.service import Service, join_salts
from server.stores.document_registry import DocumentEntry
from server.stores.document_texts import Documents, name_chunks, unknown_document
from server.text.chunker import Chunks, count_tokens
from server.text.model_tokenizer import TooManyTokens
from server.text.text_pool import INLINE_CHARS

MAX_PAGE = 1000
DEFAULT_PAGE = 100


async def add_document(call: Call[DocumentBody]) -> Tree:
    """Store a text and its chunks. The same title and text again are the same document."""
    service, body, documents = call.service, call.body, _documents_of(call.service)
    limits = service.supervisor.ready()
    text = _text_of(body)
    async with service.texts.one_at_a_time(INLINE_CHARS + len(text)):
        chunks = await _cut(service, documents, text, limits)
    if not chunks:
        raise invalid("text", "empty; wanted at least one token")
    salt = join_salts(call.cache_salt, body.cache_salt)
    named = name_chunks(chunks, salt)
    entry = await documents.registry.add(call.owner, body.title or "", text, True, named)
    await count_documents(service)
    storing = service.supervisor.store_chunks([chunk.tobytes() for chunk in chunks], salt)
    stored = await storing if body.wait is not False else None
    if isinstance(stored, ApiError):
        raise stored
    counts = {"num_tokens": count_tokens(chunks), "num_chunks": len(chunks)}
    return _describe(entry) | counts | _report(stored)


async def list_documents(call: Call[Any]) -> Tree:
    """Return a page of the key's documents, oldest first."""
    limit, after = call.page_limit(MAX_PAGE, DEFAULT_PAGE), call.request.query_params.get("after")
    found = await _documents_of(call.service).registry.page(call.owner, after, limit + 1)
    if found is None:
        raise unknown_document("after", after or "")
    data = [_describe(entry) for entry in found[:limit]]
    return {"object": "list", "data": data, "has_more": len(found) > limit}


async def show_document(call: Call[Any]) -> Tree:
    """Return a document of the key. Raises ApiError 404."""
    document_id = call.path_value("document_id")
    found = await _documents_of(call.service).registry.find(call.owner, [document_id], sys.maxsize)
    if document_id not in found:
        raise unknown_document("document_id", document_id)
    document = found[document_id]
    return _describe(document.entry) | {"text": document.text}


async def delete_document(call: Call[Any]) -> Tree:
    """Delete a document of the key, and those of its chunks that no other document has. Raises ApiError 404."""
    service, document_id = call.service, call.path_value("document_id")
    unnamed = await _documents_of(service).registry.delete(call.owner, document_id)
    if unnamed is None:
        raise unknown_document("document_id", document_id)
    for other in call.models.sharing_chunks(service):
        other.supervisor.drop_chunks(unnamed)  # before anything is awaited: who leaves the text again comes after
    await count_documents(service)
    return {"id": document_id, "object": "document.deleted", "deleted": True}


async def count_documents(service: Service) -> None:
    """Set the gauge of documents, which other processes that share the file may have changed."""
    if service.documents is not None:
        service.metrics.documents.set(await service.documents.registry.count())


def write_messages(messages: Sequence[Message]) -> str:
    """Return messages as one text, each with who says it; calls are `name(arguments)` on lines of their own."""
    return "\n\n".join(f"{message.name or message.role}: {_write_said(message)}" for message in messages)


def _write_said(message: Message) -> str:
    calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []]
    return "\n".join(filter(None, [message_text(message), *calls]))


def _require_documents(service: Service) -> None:
    """Check that the deployment takes documents. Raises ApiError 404."""
    if service.documents is None:
        raise ApiError(404, f"documents: {DOCUMENTS_OFF}", code="documents_off")


def _documents_of(service: Service) -> Documents:
    assert service.documents is not None
    return service.documents


def _text_of(body: DocumentBody) -> str:
    if (body.text is None) == (body.messages is None):
        raise invalid("text", "give either text or messages, and not both")
    if body.messages is None:
        return body.text or ""
    check_messages(body.messages)
    return write_messages(body.messages)


async def _cut(service: Service, documents: Documents, text: str, limits: Ready) -> Chunks:
    """Return the chunks of a text that some prompt has room for. Raises ApiError 400."""
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


def _has_documents(limits: BodyLimits) -> bool:
    return limits.has_documents


_ID = {"type": "string", "pattern": DOCUMENT_ID}
_PATH_ID = path_parameter("document_id", _ID)
_PATH = "/v1/documents/{document_id}"
ROUTES = (
    Route(
        "post",
        "/v1/documents",
        add_document,
        "Store a document, and its chunks ahead of chats",
        NewDocument,
        DOCUMENT,
        {"text": "The meeting is on Tuesday."},
        errors=BODY_ERRORS,
        check=_require_documents,
        is_offered=_has_documents,
    ),
    Route(
        "get",
        "/v1/documents",
        list_documents,
        "The key's documents, oldest first",
        DocumentList,
        errors=(*READ_ERRORS, 400),
        parameters=(page_parameter(MAX_PAGE, DEFAULT_PAGE), query_parameter("after", _ID)),
        check=_require_documents,
        is_offered=_has_documents,
    ),
    Route(
        "get",
        _PATH,
        show_document,
        "A document and its text",
        WholeDocument,
        parameters=(_PATH_ID,),
        check=_require_documents,
        is_offered=_has_documents,
    ),
    Route(
        "delete",
        _PATH,
        delete_document,
        "Delete a document",
        DeletedDocument,
        parameters=(_PATH_ID,),
        check=_require_documents,
        is_offered=_has_documents,
    ),
)
