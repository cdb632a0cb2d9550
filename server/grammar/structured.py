"""Compile the required form of an answer into llguidance's format: a JSON schema, a pattern, choices or a grammar.

The grammar is sent to the engine with the request (`EngineRequest.grammar`). Its size is limited and it is checked
here, so a request is refused before it is queued, with the name of the keyword that cannot be enforced. JSON has at
most one space between tokens, so no answer is endless whitespace.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec
from llguidance import LLMatcher, grammar_from

from scheduler.constraints.grammar import MOST_BYTES
from scheduler.constraints.lexeme_trial import Lexeme
from server.api_error import UNSUPPORTED_GRAMMAR, invalid
from server.bodies.answer_form import StructuredOutputs, form_param
from server.bodies.generation_bodies import GenerationBody
from server.bodies.json_fault import describe_fault
from server.bodies.json_size import MOST_LEVELS, count_levels
from server.grammar.grammar_checks import check_in_process
from server.grammar.lexemes import lark_lexemes, regex_lexemes, schema_lexemes
from server.grammar.schema_fault import LEAVE_OUT, describe_pattern_fault, describe_schema_fault, name_place
from server.grammar.schema_places import show
from server.grammar.schema_rewrite import rewrite_schema

_WRITTEN_AS = {
    "item_separator": ", ",
    "key_separator": ": ",
    "whitespace_flexible": False,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
}
_OWN_OPTIONS = "x-guidance"  # where llguidance reads options in a schema
# Keywords of some draft that llguidance passes over, and which say what is valid.
_PASSED_OVER = (_OWN_OPTIONS, "divisibleBy", "disallow", "extends")
_WHY = {"minProperties": "repeated names cannot be detected, so at most one optional property can be counted"}
_BOUNDS = ("exclusiveMinimum", "exclusiveMaximum")  # of draft 4, where they are true or false
_OF_NAMES = ("properties", "patternProperties", "$defs", "definitions")
_OF_VALUES = ("const", "enum", "default", "examples")

MOST_PROPERTIES = 1000  # of an object; what it takes to compile them grows with their square


def asks_form(body: GenerationBody) -> bool:
    """Return whether a body asks for a form."""
    by_openai = body.response_format
    return body.structured_outputs is not None or (by_openai is not None and by_openai.type != "text")


def form_grammar(body: GenerationBody) -> str:
    """Return the grammar of the form that a body asks for, "" without one. Raises ApiError 400."""
    param = form_param(body.response_format, body.structured_outputs)
    if body.structured_outputs is not None:
        return _form_by_vllm(param, body.structured_outputs)
    if body.response_format is None or not asks_form(body):
        return ""
    if body.response_format.json_schema is None or body.response_format.type == "json_object":
        return object_grammar()
    return schema_grammar(param, body.response_format.json_schema.schema)


def _form_by_vllm(param: str, form: StructuredOutputs) -> str:
    if form.regex is not None:
        return regex_grammar(param, form.regex)
    if form.choice is not None:
        return choice_grammar(param, form.choice)
    if form.grammar is not None:
        return lark_grammar(param, form.grammar)
    if form.json_object:
        return object_grammar()
    if not isinstance(form.json, str):
        return schema_grammar(param, form.json)
    raw = form.json.encode("utf-8", "surrogatepass")
    levels = count_levels(raw)
    if levels > MOST_LEVELS:
        raise invalid(param, f"nested {levels} levels deep, at most {MOST_LEVELS} are read")
    try:
        schema = msgspec.json.decode(form.json)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(param, f"got a string, wanted a JSON schema as text: {describe_fault(raw, str(error))}") from None
    return schema_grammar(param, schema)


def schema_grammar(param: str, schema: object) -> str:
    """Return the grammar of JSON that a schema accepts. Raises ApiError 400 that names an unenforceable keyword."""
    return _compile_schema(param, _rewrite(param, schema))


def _compile_schema(param: str, schema: Any) -> str:
    text = json.dumps({} if schema is True else schema, ensure_ascii=False)
    try:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides=_WRITTEN_AS)  # type: ignore[arg-type]
    except ValueError as error:  # a number that JSON may have, and llguidance's reader has no room for
        raise invalid(param, describe_schema_fault(schema, " ".join(str(error).split())), UNSUPPORTED_GRAMMAR) from None
    _require(param, grammar, schema_lexemes(schema), partial(describe_schema_fault, schema))
    return grammar


def object_grammar() -> str:
    """Return the grammar of any JSON object."""
    return LLMatcher.grammar_from_json_schema('{"type": "object"}', overrides=_WRITTEN_AS)  # type: ignore[arg-type]


def schema_in_lark(param: str, schema: object) -> str:
    """Return a term of a Lark grammar: JSON that a schema accepts. Raises as `schema_grammar` does."""
    rewritten = _rewrite(param, schema)
    _compile_schema(param, rewritten)
    return "%json " + json.dumps(({} if rewritten is True else rewritten) | {_OWN_OPTIONS: _WRITTEN_AS})


def regex_grammar(param: str, pattern: str) -> str:
    """Return the grammar of texts that a regular expression matches as a whole. Raises ApiError 400."""
    _require_size(param, pattern)
    grammar = LLMatcher.grammar_from_regex(pattern)
    _require(param, grammar, regex_lexemes(pattern), partial(describe_pattern_fault, pattern))
    return grammar


def choice_grammar(param: str, choices: Sequence[str]) -> str:
    """Return the grammar of one of these texts. Raises ApiError 400."""
    if not choices:
        raise invalid(param, "got an empty list, wanted at least one choice", UNSUPPORTED_GRAMMAR)
    if not all(choices):
        at = f"{param}[{list(choices).index('')}]"
        raise invalid(at, "got an empty text, wanted one of at least one character", UNSUPPORTED_GRAMMAR)
    text = "start: " + " | ".join(map(json.dumps, choices))
    _require_size(param, text)
    grammar = LLMatcher.grammar_from_lark(text)
    _require(param, grammar, (), str)
    return grammar


def lark_grammar(param: str, text: str) -> str:
    """Return the grammar of a client's text in Lark's notation or GBNF. Raises ApiError 400."""
    _require_size(param, text)
    try:
        grammar = grammar_from("grammar", text)
    except ValueError as error:
        why = " ".join(str(error).split())
        raise invalid(param, f"wanted a grammar in Lark's notation, or GBNF: {why}", UNSUPPORTED_GRAMMAR) from None
    _require(param, grammar, lark_lexemes(grammar), str)
    return grammar


def own_grammar(param: str, lark: str) -> str:
    """Return the grammar of a text in Lark's notation that this server wrote, whose schemas are already checked.

    Raises ApiError 400.
    """
    _require_size(param, lark)
    _require(param, lark, (), str)
    return lark


def grammar_with_form(param: str, lark: str, form: str) -> str:
    """Return the grammar of a text in Lark's notation in which `@form` is another grammar of this module.

    Raises ApiError 400.
    """
    _require_size(param, lark)
    first, *others = json.loads(form)["grammars"] if form.startswith("{") else [{"lark_grammar": form}]
    grammar = json.dumps({"grammars": [{"lark_grammar": lark}, first | {"name": "form"}, *others]}, ensure_ascii=False)
    _require(param, grammar, (), str)
    return grammar


def _rewrite(param: str, schema: object) -> Any:
    """Return the schema in the form in which it is compiled.

    Raises ApiError 400 if it is not a schema, too long, or would be ignored in part.
    """
    rewritten = schema
    if isinstance(schema, dict):
        for keyword in _find_keywords(param, schema):
            why = _WHY.get(keyword, "it means nothing in drafts 6, 7, 2019-09 and 2020-12")
            raise invalid(param, f"{name_place(schema, keyword)}: {why}; {LEAVE_OUT}", UNSUPPORTED_GRAMMAR)
        try:
            _require_size(param, json.dumps(schema, ensure_ascii=False, allow_nan=False))
        except ValueError as error:
            raise invalid(param, str(error), UNSUPPORTED_GRAMMAR) from None
        rewritten = rewrite_schema(schema)
        if rewritten is False:
            keyword = "not" if "not" in schema else "$ref"
            raise invalid(param, f"#/{keyword}: no value satisfies this schema", UNSUPPORTED_GRAMMAR)
    if rewritten is False or not isinstance(rewritten, dict | bool):
        wanted = "a JSON schema that some value satisfies"
        raise invalid(param, f"got {show(schema)}, wanted {wanted}", UNSUPPORTED_GRAMMAR)
    return rewritten


def _find_keywords(param: str, schema: Any) -> list[str]:
    """Return the keywords that are always refused, with their places.

    Raises ApiError 400 for too many properties.
    """
    found, pending = [], [schema]
    while pending:
        one = pending.pop()
        if isinstance(one, list):
            pending += one
        elif isinstance(one, dict):
            found += [keyword for keyword in _PASSED_OVER if keyword in one]
            found += [keyword for keyword in _BOUNDS if isinstance(one.get(keyword), bool)]
            num_known, least = len(_list_of(one.get("required"))), one.get("minProperties")
            if isinstance(least, int) and least > num_known + 1:
                found.append("minProperties")
            for name, value in one.items():
                if name in _OF_NAMES and isinstance(value, dict):
                    if len(value) > MOST_PROPERTIES:
                        raise invalid(
                            param, f"{name}: {len(value)} of one object, at most {MOST_PROPERTIES}", UNSUPPORTED_GRAMMAR
                        )
                    pending += value.values()
                elif name not in _OF_VALUES:
                    pending.append(value)
    return found


def _list_of(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _require_size(param: str, text: str) -> None:
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > MOST_BYTES:
        raise invalid(param, f"{size} bytes, at most {MOST_BYTES} are compiled", UNSUPPORTED_GRAMMAR)


def _require(param: str, grammar: str, lexemes: Sequence[Lexeme], describe: Callable[[str], str]) -> None:
    """Check that a grammar compiles. lexemes: also tried alone. describe: turns llguidance's reason into a message."""
    why = check_in_process(grammar, lexemes)
    if why:
        raise invalid(param, describe(why), UNSUPPORTED_GRAMMAR)
