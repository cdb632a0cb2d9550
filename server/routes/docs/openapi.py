"""`/openapi.json`: the API as a document, from what its bodies may be and from the types of its answers.

Knows schemas alone. FastAPI would describe its own parsing, which is not used here.
"""

from importlib.metadata import version
from typing import Any

import msgspec

from server.bodies.body_reader import FIELDS
from server.bodies.generation_bodies import ChatBody, CompletionBody, DetokenizeBody, DocumentBody, TokenizeBody
from server.bodies.ranges import MOST_SECONDS
from server.bodies.translated_bodies import CountTokensBody, MessagesBody, ResponsesBody
from server.bodies.vector_bodies import EmbeddingsBody, RerankBody
from server.generation.time_limit import TIME_HEADER
from server.routes.answer import Error
from server.routes.chat.chat_answers import ChatChunk, ChatCompletion, Completion, CompletionChunk
from server.routes.docs.body_schemas import BodyLimits, Tree, complete_schemas
from server.routes.documents.document_answers import DeletedDocument, DocumentList, NewDocument, WholeDocument
from server.routes.documents.document_routes import DEFAULT_PAGE, MAX_PAGE
from server.routes.messages.message_answers import AnsweredMessage, InputTokens, MessageError, MessageEvent
from server.routes.responses.response_answers import DeletedResponse, InputItems, Response, ResponseEvent
from server.routes.responses.response_routes import DEFAULT_ITEMS, MAX_ITEMS, ORDERS
from server.routes.status.status_answers import Health, Live, Loads, Model, Models, ServerInfo, TokenizerInfo, Version
from server.routes.tokens.token_answers import Text, Tokens
from server.routes.vectors.vector_answers import Embeddings, Ranking
from server.routes.vectors.vector_routes import RANKING_PATHS
from server.stores.document_registry import DOCUMENT_ID

_ANSWERS = (
    Error, Completion, ChatCompletion, Tokens, Text, Models, Model, Health, Live, Version, CompletionChunk, ChatChunk,
    TokenizerInfo, ServerInfo, Loads, NewDocument, WholeDocument, DocumentList, DeletedDocument, Embeddings, Ranking,
    Response, ResponseEvent, InputItems, DeletedResponse, AnsweredMessage, MessageEvent, MessageError, InputTokens,
)  # fmt: skip
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "a field, or the whole body, cannot be served: `param` names it",
    "401": "no key, or an unknown one",
    "404": "no such model, or no such document or response of this key",
    "408": "headers or body were not complete in time, or nothing was generated in `max_seconds`",
    "413": "the body is larger than `server.max_body_mib`",
    "415": "not JSON, or compressed",
    "429": "the queue is full; `retry-after` says when to come again",
    "431": "too many headers, or too large ones",
    "500": "the request failed in the engine",
    "503": "loading, draining, hung or dead; `retry-after` says when to come again",
}
_DOCUMENT_ID = {"type": "string", "pattern": DOCUMENT_ID}
_PAGE = {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": DEFAULT_PAGE}
_SECONDS = {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS}
_TIME = {"name": TIME_HEADER, "in": "header", "schema": _SECONDS, "description": "as `max_seconds`; the least counts"}
# What a page offers to send, in place of every field with a made-up value.
EXAMPLES: dict[type, Tree] = {
    CompletionBody: {"prompt": "Once upon a time", "max_tokens": 32},
    ChatBody: {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    ResponsesBody: {"input": "Hello!", "max_output_tokens": 32},
    MessagesBody: {"messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 32},
    CountTokensBody: {"messages": [{"role": "user", "content": "Hello!"}]},
    EmbeddingsBody: {"input": ["Hello!"]},
    RerankBody: {"query": "capital of France", "documents": ["Paris is in France.", "Cats sleep."]},
    TokenizeBody: {"prompt": "Hello!"},
    DetokenizeBody: {"tokens": [1, 2, 3]},
    DocumentBody: {"text": "The meeting is on Tuesday."},
}
_OF_ANY = ("401", "404", "408", "431", "503")


def build_document(limits: BodyLimits, has_keys: bool) -> Tree:
    """The OpenAPI 3.1 document of this server."""
    _, components = msgspec.json.schema_components((*FIELDS, *_ANSWERS), ref_template=_REF)
    complete_schemas(components, limits)
    model_id = {"name": "model_id", "in": "path", "required": True, "schema": {"enum": list(limits.model_ids)}}
    completes = _posts("Continue a text", CompletionBody, Completion, CompletionChunk)
    chats = _posts("Answer a chat", ChatBody, ChatCompletion, ChatChunk)
    ranks = _posts("Rank documents by a query", RerankBody, Ranking, None, generates=True)
    messages = _of_messages(_posts("Answer Anthropic's clients", MessagesBody, AnsweredMessage, MessageEvent))
    counts = _of_messages(_posts("Tokens of such a prompt", CountTokensBody, InputTokens, None))
    document: Tree = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version("tandem"),
            "description": "OpenAI's completions, chats, responses and embeddings, Anthropic's messages, ranking, "
            "documents, and what a server says about itself.",
        },
        "paths": {
            "/v1/completions": {"post": completes},
            "/v1/chat/completions": {"post": chats},
            "/v1/responses": {"post": _posts("Answer, and be followed", ResponsesBody, Response, ResponseEvent)},
            **_response_paths(),
            "/v1/messages": {"post": messages},
            "/v1/messages/count_tokens": {"post": counts},
            "/v1/embeddings": {"post": _posts("Texts as vectors", EmbeddingsBody, Embeddings, None, generates=True)},
            **{path: {"post": ranks | {"operationId": path.strip("/").replace("/", "_")}} for path in RANKING_PATHS},
            "/tokenize": {"post": _posts("A text or messages in tokens", TokenizeBody, Tokens, None)},
            "/detokenize": {"post": _posts("Tokens as a text", DetokenizeBody, Text, None)},
            "/v1/models": {"get": _gets("The model that is served", Models)},
            "/v1/models/{model_id}": {"get": _gets("The model, by its id", Model, parameters=[model_id])},
            "/tokenizer_info": {"get": _gets("The tokenizer's settings", TokenizerInfo)},
            "/server_info": {"get": _gets("The model and the engine's limits, for routers", ServerInfo)},
            "/v1/loads": {"get": _gets("How busy the engine is, for routers", Loads)},
            "/health": {"get": _gets("Whether the engine serves", Health, Health)},
            "/live": {"get": _gets("Whether this process can still do so", Live, Live)},
            "/version": {"get": _gets("Tandem's version", Version)},
            "/metrics": {"get": _gets("Prometheus metrics", None)},
        },
        "components": {"schemas": components},
    }
    if limits.has_documents:
        document["paths"] |= _document_paths()
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in ("/health", "/live", "/version", "/metrics"):
            document["paths"][path]["get"]["security"] = []
    return document


def _response_paths() -> Tree:
    response_id = {"name": "response_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
    page = [
        {"name": "limit", "in": "query", "schema": _PAGE | {"maximum": MAX_ITEMS, "default": DEFAULT_ITEMS}},
        {"name": "order", "in": "query", "schema": {"enum": list(ORDERS), "default": "desc"}},
        {"name": "after", "in": "query", "schema": {"type": "string"}},
    ]
    shows = _gets("A response that is kept", Response, parameters=[response_id])
    deletes = _gets("Forget a response", DeletedResponse, parameters=[response_id])
    lists = _gets("What was said up to a response", InputItems, parameters=[response_id, *page])
    for reads in (shows, lists):
        reads["responses"] |= _errors(["400"])
    return {
        "/v1/responses/{response_id}": {"get": shows, "delete": deletes},
        "/v1/responses/{response_id}/input_items": {"get": lists},
    }


def _document_paths() -> Tree:
    document_id = {"name": "document_id", "in": "path", "required": True, "schema": _DOCUMENT_ID}
    page = [
        {"name": "limit", "in": "query", "schema": _PAGE},
        {"name": "after", "in": "query", "schema": _DOCUMENT_ID},
    ]
    lists = _gets("The key's documents, oldest first", DocumentList, parameters=page)
    lists["responses"] |= _errors(["400"])
    shows = _gets("A document and its text", WholeDocument, parameters=[document_id])
    deletes = _gets("Delete a document", DeletedDocument, parameters=[document_id])
    return {
        "/v1/documents": {
            "post": _posts("Store a document, and its chunks ahead of chats", DocumentBody, NewDocument, None),
            "get": lists,
        },
        "/v1/documents/{document_id}": {"get": shows, "delete": deletes},
    }


def _posts(summary: str, body: type, answer: type, chunk: type | None, generates: bool = False) -> Tree:
    """`chunk`: what the events of a stream hold; None: it does not stream. generates: the engine works for it, as for
    all that streams.
    """
    generates |= chunk is not None
    whole = _content(answer)
    if chunk is not None:
        whole |= {"text/event-stream": {"schema": _event(chunk)}}
    codes = [code for code in _REFUSALS if generates or code != "500"]
    return {
        "summary": summary,
        "parameters": [_TIME] if generates else [],
        "operationId": body.__name__.removesuffix("Body").lower(),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": _refer(body), "example": EXAMPLES[body]}},
        },
        "responses": {"200": {"description": "done", "content": whole}} | _errors(codes),
    }


def _of_messages(operation: Tree) -> Tree:
    """Errors are Anthropic's, and so is the key's header beside the usual one."""
    for code, answer in operation["responses"].items():
        if code != "200":
            answer["content"] = _content(MessageError)
    return operation


def _event(chunk: type) -> Tree:
    """The chunk, or the error that ends a stream early, as JSON; `[DONE]` ends one that is whole."""
    schemas = [_refer(kind) for kind in (chunk, Error)]
    tree = {"contentMediaType": "application/json", "contentSchema": {"anyOf": schemas}}
    data = {"type": "string", "if": {"const": "[DONE]"}, "else": tree}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _gets(summary: str, answer: type | None, unavailable: type = Error, parameters: Any = ()) -> Tree:
    content = {"text/plain": {"schema": {"type": "string"}}} if answer is None else _content(answer)
    responses = {"200": {"description": "done", "content": content}} | _errors(_OF_ANY)
    responses["503"]["content"] = _content(unavailable)
    return {"summary": summary, "parameters": list(parameters), "responses": responses}


def _errors(codes: Any) -> Tree:
    return {code: {"description": _REFUSALS[code], "content": _content(Error)} for code in codes}


def _content(kind: type) -> Tree:
    return {"application/json": {"schema": _refer(kind)}}


def _refer(kind: type) -> Tree:
    return {"$ref": _REF.format(name=kind.__name__)}
