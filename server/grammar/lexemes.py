"""Find the regular expressions in a client's schema or grammar, and write a grammar of each alone to try it."""

import json
import re
from typing import Any

from llguidance import LLMatcher

from scheduler.constraints.lexeme_trial import Lexeme
from server.grammar.schema_fault import refuse_pattern
from server.grammar.schema_places import show, walk

_MOST = 32  # of a form: those with the most counts
_OF_TEXTS = ("pattern", "minLength", "maxLength", "format")  # what is said of one text
# In Lark: texts and comments, in which nothing is an expression; expressions; terminals up to the next line's name.
_LITERAL = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|#[^\n]*|/(?P<pattern>(?:\\.|[^/\\\n])+)/[a-z]*')
_TERMINAL = re.compile(r"^(?P<name>[A-Z_][A-Z0-9_]*)[^:\n]*:(?P<body>.*(?:\n[ \t]*\|.*)*)", re.MULTILINE)
_START = re.compile(r"^start\b", re.MULTILINE)
_JSON = re.compile(r"%json\s*(?={)")


def schema_lexemes(schema: Any) -> list[Lexeme]:
    """Return the lexemes of a JSON schema, each as part of a JSON text, as the schema uses it."""
    found: dict[str, Lexeme] = {}
    for place, one in walk(schema):
        if not isinstance(one, dict):
            continue
        names = one.get("patternProperties")
        texts = [("patternProperties", {"pattern": name}) for name in names] if isinstance(names, dict) else []
        if isinstance(one.get("pattern"), str):
            texts.append(("pattern", {key: one[key] for key in _OF_TEXTS if key in one}))
        for keyword, text in texts:
            raw, pattern = json.dumps({"type": "string"} | text), text["pattern"]
            try:
                alone = LLMatcher.grammar_from_json_schema(raw)
            except ValueError:  # a number that has no room: whoever compiles the whole says so
                continue
            found.setdefault(raw, Lexeme(f"{place}/{keyword}: {refuse_pattern(pattern)}", alone, pattern))
    return _choose(list(found.values()))


def regex_lexemes(pattern: str) -> list[Lexeme]:
    return [Lexeme(refuse_pattern(pattern), LLMatcher.grammar_from_regex(pattern), pattern)]


def lark_lexemes(text: str) -> list[Lexeme]:
    """Return the expressions of a grammar in Lark's notation, its terminals that count others, and what its schemas
    have."""
    found = []
    for literal in _LITERAL.finditer(text):
        if pattern := literal["pattern"]:
            told = refuse_pattern(pattern)
            found.append(Lexeme(told, LLMatcher.grammar_from_lark(f"start: {literal[0]}"), pattern))
    for terminal in _TERMINAL.finditer(text):
        if any(sign in terminal["body"] for sign in "{~"):
            alone = _START.sub("was_start", text) + f"\nstart: {terminal['name']}"
            told = f"got {show(terminal['name'])}, wanted a terminal that can be kept token by token"
            found.append(Lexeme(told, LLMatcher.grammar_from_lark(alone), terminal["body"]))
    for mark in _JSON.finditer(text):
        try:
            schema, _ = json.JSONDecoder().raw_decode(text, mark.end())
        except (ValueError, RecursionError):
            continue
        found += schema_lexemes(schema)
    return _choose(found)


def _choose(found: list[Lexeme]) -> list[Lexeme]:
    return sorted(found, key=lambda one: -one.text.count("{"))[:_MOST]
