"""State the limits in a request body's JSON Schema beyond its types, as hand-written checks enforce them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

Tree = dict[str, Any]

NULL: Tree = {"type": "null"}
SCHEMA: Tree = {"type": "object", "description": "a JSON schema; one that cannot be enforced is refused by keyword"}
SCHEMAS: list[Tree] = [SCHEMA, {"const": True}]


@dataclass(frozen=True, slots=True)
class BodyLimits:
    """State what this server accepts; `profiles` is empty and the two numbers are None until the engine is ready."""

    model_ids: tuple[str, ...]
    refusing: frozenset[type]  # structs whose unknown fields are errors
    min_prompt_chars: int  # 0 if an empty text has a token: a BOS
    max_tokenize_items: int  # characters or ids
    max_sequences: int
    profiles: tuple[str, ...]  # of attention
    takes_epsilon: bool  # whether some profile bounds its errors
    vocab_size: int | None
    max_context_tokens: int | None
    has_documents: bool
    ranks_by: Literal["cosine", "yes_no"] | None
    has_nested_embeddings: bool


def _no_bounds(_: BodyLimits) -> dict[str, Tree]:
    return {}


@dataclass(frozen=True, slots=True)
class SchemaLimits:
    """A struct's limits: `bounds` gives the keywords of fields, `required` names fields that a check wants, and
    `conditions` are keywords of the whole object.
    """

    bounds: Callable[[BodyLimits], dict[str, Tree]] = _no_bounds
    required: tuple[str, ...] = ()
    conditions: Tree = field(default_factory=dict)


def refer_to(struct: type) -> Tree:
    """Return a reference to a struct's schema among the document's components."""
    return {"$ref": f"#/components/schemas/{struct.__name__}"}


def between(least: float, most: float, is_closed: bool) -> Tree:
    """Return the bounds of a number; `is_closed`: the least value is allowed."""
    return {"minimum" if is_closed else "exclusiveMinimum": least, "maximum": most}


def unless(name: str, value: object, otherwise: Tree) -> Tree:
    """Return a condition: where field `name` has another value, the fields of `otherwise` have these schemas."""
    return {"if": {"properties": {name: {"const": value}}, "required": [name]}, "else": {"properties": otherwise}}


def token_id(limits: BodyLimits) -> Tree:
    most = {} if limits.vocab_size is None else {"maximum": limits.vocab_size - 1}
    return {"type": "integer", "minimum": 0} | most


def prompts(limits: BodyLimits, most: int) -> Tree:
    """Return the schema of a text, token ids, or a list of at most `most` of either kind."""
    text: Tree = {"type": "string", "minLength": limits.min_prompt_chars}
    ids: Tree = {"type": "array", "items": token_id(limits), "minItems": 1}
    if limits.max_context_tokens is not None:
        ids["maxItems"] = limits.max_context_tokens
    of_one_kind: Tree = {"type": "array", "minItems": 1, "maxItems": most}
    return {"anyOf": [text, ids, of_one_kind | {"items": text}, of_one_kind | {"items": ids}]}


def text_or_messages(text: str) -> Tree:
    """Return the condition that exactly one of the fields `text` and `messages` is given."""
    either = [
        {"required": [text], "properties": {text: {"type": "string"}, "messages": NULL}},
        {"required": ["messages"], "properties": {"messages": {"type": "array"}, text: NULL}},
    ]
    return {"oneOf": either}
