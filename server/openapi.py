"""`/openapi.json` and `/docs`: the API as a document, from the types of its bodies and of its answers.

Knows schemas alone. FastAPI would describe its own parsing, which is not used here; its page of documentation loads
scripts from elsewhere, and this one is for machines that reach nothing.
"""

from html import escape
from importlib.metadata import version
from typing import Any

import msgspec

from server import answers
from server.bodies import (
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
    RANGES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    TokenizeBody,
)

Tree = dict[str, Any]

_BODIES = (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody)
_ANSWERS = (
    answers.Error, answers.Completion, answers.ChatCompletion, answers.Tokens, answers.Text, answers.Models,
    answers.Model, answers.Health, answers.Live, answers.Version, answers.CompletionChunk, answers.ChatChunk,
    answers.TokenizerInfo, answers.ServerInfo, answers.Loads,
)  # fmt: skip
_REF = "#/components/schemas/{name}"
_REFUSALS = {
    "400": "a field, or the whole body, cannot be served: `param` names it",
    "401": "no key, or an unknown one",
    "404": "no such model",
    "408": "headers or body were not complete in time",
    "413": "the body is larger than `server.max_body_mib`",
    "415": "not JSON, or compressed",
    "429": "the queue is full; `retry-after` says when to come again",
    "431": "too many headers, or too large ones",
    "500": "the request failed in the engine",
    "503": "loading, draining, hung or dead; `retry-after` says when to come again",
}
_OF_ANY = ("401", "404", "408", "431", "503")


def build_document(model_name: str, profiles: tuple[str, ...], has_keys: bool) -> Tree:
    """The OpenAPI 3.1 document of this server; `profiles`: of attention, none while they are not known."""
    _, components = msgspec.json.schema_components((*_BODIES, *_ANSWERS), ref_template=_REF)
    for name in ("Message", *(body.__name__ for body in _BODIES)):
        _bound(components[name], model_name, profiles)
    completes = _posts("Continue a text", CompletionBody, answers.Completion, answers.CompletionChunk)
    chats = _posts("Answer a chat", ChatBody, answers.ChatCompletion, answers.ChatChunk)
    document: Tree = {
        "openapi": "3.1.0",
        "info": {
            "title": "Tandem",
            "version": version("tandem"),
            "description": "OpenAI's completions and chat completions, and what a server says about itself.",
        },
        "paths": {
            "/v1/completions": {"post": completes},
            "/v1/chat/completions": {"post": chats},
            "/tokenize": {"post": _posts("A text or messages in tokens", TokenizeBody, answers.Tokens, None)},
            "/detokenize": {"post": _posts("Tokens as a text", DetokenizeBody, answers.Text, None)},
            "/v1/models": {"get": _gets("The model that is served", answers.Models)},
            "/v1/models/{model_id}": {"get": _gets("The model, by its id", answers.Model, parameters=[_MODEL_ID])},
            "/tokenizer_info": {"get": _gets("The tokenizer's settings", answers.TokenizerInfo)},
            "/server_info": {"get": _gets("The model and the engine's limits, for routers", answers.ServerInfo)},
            "/v1/loads": {"get": _gets("How busy the engine is, for routers", answers.Loads)},
            "/health": {"get": _gets("Whether the engine serves", answers.Health, answers.Health)},
            "/live": {"get": _gets("Whether this process can still do so", answers.Live, answers.Live)},
            "/version": {"get": _gets("Tandem's version", answers.Version)},
            "/metrics": {"get": _gets("Prometheus metrics", None)},
        },
        "components": {"schemas": components},
    }
    if has_keys:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"key": []}]
        for path in ("/health", "/live", "/version", "/metrics"):
            document["paths"][path]["get"]["security"] = []
    return document


def write_page(document: Tree) -> str:
    """The document for people, in one page that needs nothing else."""
    parts = []
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            parts.append(f"<h2><code>{method.upper()} {escape(path)}</code></h2><p>{escape(operation['summary'])}</p>")
            if "requestBody" in operation:
                name = operation["requestBody"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
                parts.append(_table(document["components"]["schemas"][name]))
            codes = ", ".join(sorted(operation["responses"]))
            parts.append(f"<p>Answers: {codes}</p>")
    style = "body{font:16px/1.5 system-ui;max-width:60rem;margin:2rem auto;padding:0 1rem}td,th{text-align:left;"
    style += "padding:.1rem .8rem .1rem 0;vertical-align:top}code{font-size:.95em}"
    title = f"{document['info']['title']} {document['info']['version']}"
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title>'
    opening = f"<h1>{title}</h1><p>{escape(document['info']['description'])} "
    opening += 'As a document: <a href="openapi.json">openapi.json</a>.</p>'
    head += f"<style>{style}</style>"
    return f'<!doctype html><html lang="en"><head>{head}</head><body>{opening}{"".join(parts)}</body></html>'


def _or_null(*kinds: Tree) -> Tree:
    return {"anyOf": [*kinds, {"type": "null"}], "default": None}


_MODEL_ID = {"name": "model_id", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _bound(schema: Tree, model_name: str, profiles: tuple[str, ...]) -> None:
    """What `server.bodies` checks by hand, and the names that this server knows."""
    fields = schema["properties"]
    for name, (least, most, is_closed) in RANGES.items():
        if name in fields:
            fields[name] |= {"minimum" if is_closed else "exclusiveMinimum": least, "maximum": most}
    for name, value in _BY_HAND.items():
        if name in fields:
            fields[name] = value
    if "model" in fields:
        fields["model"] |= {"enum": [model_name, None]}
    if "attention_profile" in fields and profiles:
        fields["attention_profile"] |= {"enum": [*profiles, None]}
    if schema["title"] == "CompletionBody":
        fields["logprobs"] |= {"minimum": 0, "maximum": MAX_TOP_LOGPROBS}
    if schema["title"] == "ChatBody":
        fields["messages"]["minItems"] = 1
        fields["max_tokens"]["minimum"] = 1
    if schema["title"] == "Message":
        fields["function_call"] = _NOTHING
        schema["required"] = [*schema["required"], "content"]
        fields["content"] = {"anyOf": [_TEXT, {"type": "array", "items": _TEXT_PART}]}


_TEXT = {"type": "string"}
_TEXT_PART = {"type": "object", "properties": {"type": {"enum": ["text"]}, "text": _TEXT}, "required": ["type", "text"]}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_NOTHING: Tree = {"enum": [None, False, 0, "", [], {}], "description": "not supported"}
_NO_CHOICE = {"enum": [None, "none", "auto"], "description": "tools are not supported"}
_BY_HAND: Tree = {
    "stop": _or_null(_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}),
    "stop_token_ids": _or_null({"type": "array", "items": {"type": "integer"}, "maxItems": MAX_STOP_TOKEN_IDS}),
    "logit_bias": _or_null(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]{1,9}$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
    "suffix": _or_null({"type": "string", "maxLength": 0}),
    "tools": _or_null({"type": "array", "maxItems": 0}),
    "functions": _or_null({"type": "array", "maxItems": 0}),
    "tool_calls": _or_null({"type": "array", "maxItems": 0}),
    "tool_choice": _NO_CHOICE,
    "function_call": {"enum": [None, "none", "auto"], "description": "not supported"},
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "response_format": _or_null({"type": "object", "properties": {"type": {"enum": ["text"]}}, "required": ["type"]}),
    "modalities": _or_null({"type": "array", "items": {"enum": ["text"]}}),
}


def _posts(summary: str, body: type, answer: type, chunk: type | None) -> Tree:
    """`chunk`: what the events of a stream hold, up to one that is `[DONE]` or an error; None: it does not stream."""
    whole = _content(answer)
    if chunk is not None:
        whole |= {"text/event-stream": {"schema": _event(chunk)}}
    codes = [code for code in _REFUSALS if chunk is not None or code != "500"]
    return {
        "summary": summary,
        "operationId": body.__name__.removesuffix("Body").lower(),
        "requestBody": {"required": True, "content": _content(body)},
        "responses": {"200": {"description": "done", "content": whole}} | _errors(codes),
    }


def _event(chunk: type) -> Tree:
    data = {
        "type": "string",
        "contentMediaType": "application/json",
        "contentSchema": {"$ref": _REF.format(name=chunk.__name__)},
    }
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def _gets(summary: str, answer: type | None, unavailable: type = answers.Error, parameters: Any = ()) -> Tree:
    content = {"text/plain": {"schema": {"type": "string"}}} if answer is None else _content(answer)
    responses = {"200": {"description": "done", "content": content}} | _errors(_OF_ANY)
    responses["503"]["content"] = _content(unavailable)
    return {"summary": summary, "parameters": list(parameters), "responses": responses}


def _errors(codes: Any) -> Tree:
    return {code: {"description": _REFUSALS[code], "content": _content(answers.Error)} for code in codes}


def _content(kind: type) -> Tree:
    return {"application/json": {"schema": {"$ref": _REF.format(name=kind.__name__)}}}


def _table(schema: Tree) -> str:
    rows = []
    for name, field in schema["properties"].items():
        bounds = [f"{key} {field[key]:g}" for key in ("minimum", "exclusiveMinimum", "maximum") if key in field]
        is_needed = "needed" if name in schema.get("required", ()) else ""
        cells = (f"<code>{escape(name)}</code>", escape(_kind(field)), ", ".join(bounds), is_needed)
        rows.append("<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"


def _kind(field: Tree) -> str:
    """A schema's type in a word or two."""
    if "anyOf" in field:
        kinds = [_kind(one) for one in field["anyOf"]]
        return " or ".join(dict.fromkeys(kind for kind in kinds if kind != "null")) or "null"
    if "$ref" in field:
        return str(field["$ref"].rpartition("/")[2])
    kind = field.get("type", "anything")
    return f"list of {_kind(field.get('items', {}))}" if kind == "array" else str(kind)
