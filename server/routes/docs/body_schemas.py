"""The JSON Schemas of request bodies: what `body_reader.py` and the checks accept, no more and no less.

Types come from the structs, other known fields from the tables; here stands what checks by hand add to them. What
compares two numbers (`min_tokens` and `max_tokens`, the prompt and the context) no schema can say.
"""

from dataclasses import dataclass
from typing import Any, Literal

from server.bodies.answer_form import FORMS, RESPONSE_FORMATS, JsonSchema, ResponseFormat, StructuredOutputs
from server.bodies.body_reader import FIELDS
from server.bodies.chat_message import ROLE, Message, Part
from server.bodies.chat_tools import MAX_TOOLS, TOOL_NAME, AllowedTools, ChosenTool, Function, Tool
from server.bodies.fields import Fate, Free, Neutral, Served
from server.bodies.generation_bodies import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_DOCUMENTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
    MAX_VARIABLES,
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DocumentBody,
    InlineDocument,
    TokenizeBody,
)
from server.bodies.ranges import INT64, MAX_CHOICES, MAX_TOP_LOGPROBS, RANGES
from server.bodies.translated_bodies import MessagesBody, ResponsesBody
from server.bodies.vector_bodies import MAX_INPUTS, EmbeddingsBody, RerankBody
from server.stores.document_registry import DOCUMENT_ID
from server.stores.document_texts import DOCUMENTS_OFF

Tree = dict[str, Any]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """What bodies may say to this server; `profiles` of attention is empty and the last two None until it is ready."""

    model_ids: tuple[str, ...]
    refusing: frozenset[type]  # whose unknown fields are errors
    min_prompt_chars: int  # 0 if an empty text has a token: a BOS
    max_tokenize_items: int  # characters or ids
    max_sequences: int
    profiles: tuple[str, ...]
    vocab_size: int | None
    max_context_tokens: int | None
    has_documents: bool
    ranks_by: Literal["cosine", "yes_no"] | None
    has_nested_embeddings: bool


def complete_schemas(components: Tree, limits: BodyLimits) -> None:
    """Add to the schemas of the structs in `FIELDS`, by name in `components`, all that they don't say of themselves."""
    for struct, table in FIELDS.items():
        schema = components[struct.__name__]
        schema["properties"] |= {name: _of_fate(fate) for name, fate in table.fates.items() if _is_beside(fate)}
        for name, fate in table.fates.items():
            if isinstance(fate, Served) and fate.what:
                schema["properties"][name]["description"] = fate.what
        if struct in limits.refusing:
            schema["additionalProperties"] = False
        for name, keywords in (*_bounds_of_all(limits).items(), *_bounds_of(struct, limits).items()):
            if name in table.fates and not _is_beside(table.fates[name]):
                schema["properties"][name] |= keywords
        schema["required"] += _NEEDED.get(struct, [])
        schema |= _CONDITIONS.get(struct, {})


def _is_beside(fate: Fate) -> bool:
    return isinstance(fate, Free | Neutral)


def _of_fate(fate: Fate) -> Tree:
    if isinstance(fate, Neutral):
        return {"enum": [None, *fate.values], "description": fate.reason}
    assert isinstance(fate, Free)
    return {"description": f"without effect: {fate.reason}"}


def _bounds_of_all(limits: BodyLimits) -> dict[str, Tree]:
    """Field -> keywords, for those that mean the same in each body that has them."""
    bounds: dict[str, Tree] = {
        name: {"format": "int64"} if allowed == INT64 else _between(*allowed) for name, allowed in RANGES.items()
    }
    if limits.max_context_tokens is not None:
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            bounds[name]["maximum"] = limits.max_context_tokens - 1  # beside a prompt of one token
    bounds["truncate_prompt_tokens"] = {"minimum": -1, "maximum": 2**31 - 1, "not": {"const": 0}}
    bounds["model"] = {"enum": [None, *limits.model_ids]}
    if limits.profiles:
        bounds["attention_profile"] = {"enum": [None, *limits.profiles]}
    bounds["stop"] = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, _NULL]}
    bounds["stop_token_ids"] = {"items": _token_id(limits), "maxItems": MAX_STOP_TOKEN_IDS}
    bounds["allowed_token_ids"] = {"items": _token_id(limits), "minItems": 1}
    bounds["bad_words"] = {"items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}
    bounds["logit_bias"] = {"propertyNames": _TOKEN_KEY, "additionalProperties": _BIAS, "maxProperties": MAX_BIASES}
    return bounds


def _between(least: float, most: float, is_closed: bool) -> Tree:
    return {"minimum" if is_closed else "exclusiveMinimum": least, "maximum": most}


def _bounds_of(struct: type, limits: BodyLimits) -> dict[str, Tree]:
    """Field -> keywords, where a check by hand allows less than the type."""
    bounds: dict[type, dict[str, Tree]] = {
        CompletionBody: {
            "prompt": {"anyOf": _prompts(limits, limits.max_sequences)},
            "logprobs": {"minimum": 0, "maximum": MAX_TOP_LOGPROBS},
            "best_of": {"minimum": 1, "maximum": MAX_CHOICES},  # n, which it must be
        },
        ChatBody: {
            "messages": {"minItems": 1},
            "max_tokens": {"minimum": RANGES["max_completion_tokens"][0]},
            "tools": {"maxItems": MAX_TOOLS},
            "chat_template_kwargs": {"maxProperties": MAX_VARIABLES},
            **_of_documents(limits),
        },
        Message: {"role": {"pattern": f"^{ROLE}$"}},
        Tool: {"type": {"enum": ["function"]}, "function": _refer_to(Function)},
        AllowedTools: {"tools": {"minItems": 1}},
        Function: {"name": {"type": "string", "pattern": f"^{TOOL_NAME}$"}, "parameters": _PARAMETERS},
        Part: {"type": {"enum": ["text"]}, "text": {"type": "string"}},
        ResponseFormat: {"type": {"enum": list(RESPONSE_FORMATS)}},
        JsonSchema: {"schema": {"description": "read where `type` is json_schema"}},
        StructuredOutputs: {
            "json": {"anyOf": [*_SCHEMAS, {"type": "string", "description": "a schema as text"}, _NULL]},
            "choice": {"items": {"type": "string", "minLength": 1}, "minItems": 1},
        },
        TokenizeBody: {
            "prompt": {"maxLength": limits.max_tokenize_items},
            "messages": {"minItems": 1},
            "tools": {"maxItems": MAX_TOOLS},
            "chat_template_kwargs": {"maxProperties": MAX_VARIABLES},
        },
        DetokenizeBody: {"tokens": {"items": _token_id(limits), "maxItems": limits.max_tokenize_items}},
        DocumentBody: {"messages": {"minItems": 1}},
        EmbeddingsBody: {"input": {"anyOf": _prompts(limits, MAX_INPUTS)}, **_of_vectors(limits)},
        ResponsesBody: {"max_output_tokens": _bounds_of_all(limits)["max_completion_tokens"]},
        MessagesBody: {
            "max_tokens": {"minimum": 1},
            "stop_sequences": {"items": _STOP, "maxItems": MAX_STOP_STRINGS},
        },
        RerankBody: {"instruction": _NULL if limits.ranks_by == "cosine" else {}},
    }
    return bounds.get(struct, {})


def _of_vectors(limits: BodyLimits) -> dict[str, Tree]:
    return {} if limits.has_nested_embeddings else {"dimensions": {"enum": [None]}}


def _of_documents(limits: BodyLimits) -> dict[str, Tree]:
    """Of a chat: ids, or texts with their titles."""
    if not limits.has_documents:
        return {"documents": {"enum": [None, []], "description": DOCUMENTS_OFF}}
    items = {"anyOf": [{"type": "string", "pattern": DOCUMENT_ID}, _refer_to(InlineDocument)]}
    return {"documents": {"anyOf": [{"type": "array", "items": items, "maxItems": MAX_DOCUMENTS}, _NULL]}}


def _refer_to(struct: type) -> Tree:
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def _prompts(limits: BodyLimits, most: int) -> list[Tree]:
    """A text, token ids, or a list of either kind."""
    text: Tree = {"type": "string", "minLength": limits.min_prompt_chars}
    ids: Tree = {"type": "array", "items": _token_id(limits), "minItems": 1}
    if limits.max_context_tokens is not None:
        ids["maxItems"] = limits.max_context_tokens
    of_one_kind: Tree = {"type": "array", "minItems": 1, "maxItems": most}
    return [text, ids, of_one_kind | {"items": text}, of_one_kind | {"items": ids}]


def _token_id(limits: BodyLimits) -> Tree:
    most = {} if limits.vocab_size is None else {"maximum": limits.vocab_size - 1}
    return {"type": "integer", "minimum": 0} | most


def _unless(name: str, value: object, otherwise: Tree) -> Tree:
    """Where field `name` has not this value, the fields of `otherwise` have these schemas."""
    return {"if": {"properties": {name: {"const": value}}, "required": [name]}, "else": {"properties": otherwise}}


def _text_or_messages(text: str) -> list[Tree]:
    return [
        {"required": [text], "properties": {text: {"type": "string"}, "messages": _NULL}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, text: _NULL}},
    ]


_NULL = {"type": "null"}
_STOP = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}
_SCHEMA = {"type": "object", "description": "a JSON schema; one that cannot be kept is refused with its keyword"}
_SCHEMAS = [_SCHEMA, {"const": True}]
_TOKEN_KEY = {"pattern": "^[0-9]{1,9}$", "description": "a token id"}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}
_PARAMETERS = {
    "properties": {"type": {"enum": ["object"]}, "properties": {"type": "object"}},
    "description": "a JSON schema of the arguments",
}
_NEEDED = {
    Part: ["type", "text"],
    ResponseFormat: ["type"],
    JsonSchema: ["schema"],
    Tool: ["type", "function"],
    Function: ["name"],
}
_SAYS = {"required": ["content"], "properties": {"content": {"type": ["string", "array"]}}}
_CALLS = {"required": ["tool_calls"], "properties": {"tool_calls": {"minItems": 1, "type": "array"}}}
_HAS_TOOLS = {"required": ["tools"], "properties": {"tools": {"minItems": 1, "type": "array"}}}
_STREAMED = _unless("stream", True, {"stream_options": _NULL, "return_progress": {"enum": [None, False]}})
_OF_SCHEMA = {
    "if": {"properties": {"type": {"const": "json_schema"}}, "required": ["type"]},
    "then": {
        "required": ["json_schema"],
        "properties": {
            "json_schema": {"type": "object", "required": ["schema"], "properties": {"schema": {"anyOf": _SCHEMAS}}}
        },
    },
}
_OF_CHOICE = {
    "oneOf": [
        {"required": [one], "properties": {"type": {"const": one}, one: {"type": "object"}, other: _NULL}}
        for one, other in (("function", "allowed_tools"), ("allowed_tools", "function"))
    ]
}
_GIVEN = {name: {"not": _NULL} for name in FORMS} | {"json_object": {"const": True}}
_ONE_FORM = {"oneOf": [{"required": [name], "properties": {name: _GIVEN[name]}} for name in FORMS]}
_CONDITIONS: dict[type, Tree] = {
    ResponseFormat: _OF_SCHEMA,
    StructuredOutputs: _ONE_FORM,
    ChosenTool: _OF_CHOICE,
    CompletionBody: {"allOf": [_STREAMED]},
    ChatBody: {
        "allOf": [
            _STREAMED,
            _unless("logprobs", True, {"top_logprobs": _NULL}),
            {
                "if": {
                    "properties": {"tool_choice": {"type": ["string", "object"], "not": {"enum": ["none", "auto"]}}},
                    "required": ["tool_choice"],
                },
                "then": _HAS_TOOLS,
            },
        ]
    },
    Message: {
        "anyOf": [_SAYS, _CALLS],
        "allOf": [
            _unless("role", "assistant", {"tool_calls": {"maxItems": 0}}),
            {
                "if": {"properties": {"role": {"const": "tool"}}, "required": ["role"]},
                "then": {"required": ["tool_call_id"], "properties": {"tool_call_id": {"type": "string"}}},
            },
        ],
    },
    TokenizeBody: {"oneOf": _text_or_messages("prompt")},
    DocumentBody: {"oneOf": _text_or_messages("text")},
}
