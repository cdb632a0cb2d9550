"""Write the JSON Schemas of request bodies: exactly what the structs, the tables and the checks accept.

Only checks that compare two fields (`min_tokens` and `max_tokens`, the prompt and the context, a profile and
`attention_epsilon`) cannot be expressed by a schema.
"""

from collections.abc import Iterable
from typing import Any

from server.bodies.field_table import STOP
from server.bodies.fields import Fields, NoEffect, Refused, Rule, Served
from server.bodies.generation_bodies import (
    MAX_BAD_WORD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIASES,
    MAX_STOP_STRINGS,
    MAX_STOP_TOKEN_IDS,
)
from server.bodies.keep_alive import PATTERN
from server.bodies.ranges import INT64, RANGES
from server.bodies.schema_limits import NULL, BodyLimits, Tree, between, token_id

_BAD_WORD = {"type": "string", "minLength": 1, "maxLength": MAX_BAD_WORD_CHARS}
_TOKEN_KEY = {"pattern": "^[0-9]{1,9}$", "description": "a token id"}
_BIAS = {"type": "number", "minimum": -100, "maximum": 100}


def complete_schemas(components: Tree, tables: Iterable[Fields[Any]], limits: BodyLimits) -> None:
    """Add the limits of the tables and the checks to the schemas in `components`, which are keyed by their struct."""
    for table in tables:
        schema = components[table.struct.__name__]
        fields, rules = schema["properties"], table.rules
        fields |= {name: _describe_rule(rule) for name, rule in rules.items() if isinstance(rule, NoEffect | Refused)}
        for name, rule in rules.items():
            if isinstance(rule, Served) and rule.what:
                fields[name]["description"] = rule.what
        if table.struct in limits.refusing:
            schema["additionalProperties"] = False
        for name, keywords in (*_common_bounds(limits).items(), *table.limits.bounds(limits).items()):
            if name in rules and not isinstance(rules[name], NoEffect | Refused):
                fields[name] |= keywords
        schema["required"] += table.limits.required
        schema |= table.limits.conditions


def _describe_rule(rule: Rule) -> Tree:
    if isinstance(rule, Refused):
        return {"enum": [None, *rule.values], "description": rule.reason}
    assert isinstance(rule, NoEffect)
    return {"description": f"without effect: {rule.reason}"}


def _common_bounds(limits: BodyLimits) -> dict[str, Tree]:
    """Return the keywords of fields that mean the same in each body that has them, by field."""
    bounds: dict[str, Tree] = {
        name: {"format": "int64"} if allowed == INT64 else between(*allowed) for name, allowed in RANGES.items()
    }
    if limits.max_context_tokens is not None:
        for name in ("max_tokens", "max_completion_tokens", "min_tokens"):
            bounds[name]["maximum"] = limits.max_context_tokens - 1  # beside a prompt of one token
    bounds["truncate_prompt_tokens"] = {"minimum": -1, "maximum": 2**31 - 1, "not": {"const": 0}}
    bounds["keep_alive"] = {"anyOf": [{"type": "number"}, {"type": "string", "pattern": PATTERN}, NULL]}
    bounds["model"] = {"enum": [None, *limits.model_ids]}
    if limits.profiles:
        bounds["attention_profile"] = {"enum": [None, *limits.profiles]}
    if not limits.takes_epsilon:
        bounds["attention_epsilon"] = {"enum": [None]}
    bounds["stop"] = {"anyOf": [STOP, {"type": "array", "items": STOP, "maxItems": MAX_STOP_STRINGS}, NULL]}
    bounds["stop_token_ids"] = {"items": token_id(limits), "maxItems": MAX_STOP_TOKEN_IDS}
    bounds["allowed_token_ids"] = {"items": token_id(limits), "minItems": 1}
    bounds["bad_words"] = {"items": _BAD_WORD, "maxItems": MAX_BAD_WORDS}
    bounds["logit_bias"] = {"propertyNames": _TOKEN_KEY, "additionalProperties": _BIAS, "maxProperties": MAX_BIASES}
    return bounds
