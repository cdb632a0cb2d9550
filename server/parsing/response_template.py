"""Read response templates: how a model marks the regions of its answer, as data that may come with the tokenizer.

The format is that of transformers (`utils/chat_parsing`), version 1, but its code is not used. The API process has no
transformers, and their parser neither gives back the text of a region that does not parse, nor a call's name before the
region ends. A region without an end mark whose content is JSON ends with its value.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import regex

from server.deployment import ConfigError
from server.parsing.tags import Pattern, TagForm, split_tag_pattern, split_tags

CONTENTS = frozenset({"text", "int", "float", "bool", "json", "xml-inline", "kv-lines"})
_TEMPLATE_KEYS = {"version", "defaults", "fields", "start_anchor", "start_anchor_pattern"}
_FIELD_KEYS = {
    "open", "open_pattern", "close", "close_pattern", "content", "content_args", "repeats", "join", "optional",
    "transform", "transform_each",
}  # fmt: skip
_PLACEHOLDER = regex.compile(r"\{(\w+(?:\.\w+)*)\}")
END_CHARS = 4096  # of a prompt's end, where what the template writes of the answer stands


@dataclass(frozen=True, slots=True)
class Field:
    """The marks and the content of a region.

    opens: None for the text outside of all regions. closes: None if the end of the text, or of a JSON value, ends it.
    opens_can_grow, closes_can_grow: a match at the end of the text so far may become longer. tags: set if the content
    is arguments between tags, whose values may be any text.
    """

    name: str
    opens: Pattern | None
    opens_can_grow: bool
    closes: Pattern | None
    closes_can_grow: bool
    content: str
    arguments: Mapping[str, Any]
    transform: Any
    is_list: bool
    tags: TagForm | None


@dataclass(frozen=True, slots=True)
class ResponseTemplate:
    """The fields by name. anchor: the answer begins after its last match in a prompt."""

    fields: Mapping[str, Field]
    anchor: Pattern | None

    def opening(self, prompt: str) -> str:
        """Return the beginning of the answer that the prompt's end already holds, such as an opened region."""
        if self.anchor is None:
            return ""
        end = prompt[-END_CHARS:]
        found = [match.end() for match in self.anchor.finditer(end)]
        return end[found[-1] :] if found else ""


def load_response_template(spec: object, where: str) -> ResponseTemplate:
    """Load a template. Raises ConfigError, which begins with `where`."""
    try:
        return _load(spec)
    except (ValueError, regex.error) as error:
        raise ConfigError(f"{where}: {error}") from None


def parse_region(field: Field, text: str, captures: Mapping[str, str]) -> Any:
    """Return the value of a region's text. Raises ValueError if the text does not fit, and RecursionError."""
    value = parse_content(text, field.content, field.arguments)
    if field.transform is None:
        return value
    if not field.is_list:
        return _fill(field.transform, {**captures, "content": value})
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise ValueError("wanted a list of objects")
    return [_fill(field.transform, {**captures, **item}) for item in value]


def parse_content(text: str, kind: str, arguments: Mapping[str, Any]) -> Any:
    """Return a value of one of `CONTENTS`. Raises ValueError and RecursionError."""
    stripped = text.strip() if arguments.get("strip", True) else text
    if kind == "json":
        return _parse_json(text, stripped, arguments)
    if kind == "xml-inline":
        return _parse_tags(text, arguments)
    if kind == "kv-lines":
        return _parse_lines(text, arguments)
    if kind == "bool":
        return stripped.lower() in ("true", "1")
    return {"int": int, "float": float}.get(kind, str)(stripped)


def parse_value(text: str, parser: Mapping[str, Any] | None) -> Any:
    """Return the value of a tag or line. Raises ValueError."""
    return text if parser is None else parse_content(text, parser.get("name", "text"), parser.get("args", {}))


def load_json(text: str) -> Any:
    """Load strict JSON.

    Raises RecursionError, and ValueError, also for NaN and infinities, which Python's reader takes.
    """
    return json.loads(text, parse_constant=_refuse_constant)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def write_json(text: str, arguments: Mapping[str, Any]) -> str:
    """Return JSON for a text whose strings may have other delimiters and whose keys may lack quotes.

    A string that was cut stays open.
    """
    pieces = _split_strings(text, dict(arguments.get("string_delims", ())))
    if arguments.get("unquoted_keys"):
        pieces = [part if i % 2 else regex.sub(r"(?<=[{,]\s*)([\w.-]+)\s*:", r'"\1":', part)
                  for i, part in enumerate(pieces)]  # fmt: skip
    written = "".join(encode_json(part) if i % 2 else part for i, part in enumerate(pieces))
    return written[:-1] if len(pieces) % 2 == 0 else written


def _split_strings(text: str, ends: Mapping[str, str]) -> list[str]:
    """Return pieces of a text, those at odd places from between delimiters; the last string may be open."""
    pieces, at = [], 0
    begins = regex.compile("|".join(map(regex.escape, ends)) or "(?!)")
    while (begin := begins.search(text, at)) is not None:
        end = text.find(ends[begin[0]], begin.end())
        pieces.append(text[at : begin.start()])
        if end < 0:
            return [*pieces, text[begin.end() :]]
        pieces.append(text[begin.end() : end])
        at = end + len(ends[begin[0]])
    return [*pieces, text[at:]]


def encode_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _parse_json(text: str, stripped: str, arguments: Mapping[str, Any]) -> Any:
    try:
        return load_json(write_json(text, arguments))
    except ValueError:
        if arguments.get("allow_non_json"):
            return stripped
        raise


def _parse_tags(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    form = split_tag_pattern(arguments["tag_pattern"])
    if form is not None:
        pairs = split_tags(form, text)
    else:
        matches = [match.groupdict() for match in regex.finditer(arguments["tag_pattern"], text, regex.DOTALL)]
        pairs = [(groups["key"], groups.get("value") or "") for groups in matches]
    found: dict[str, Any] = {}
    for key, written in pairs:
        value = parse_value(written, arguments.get("value_parser"))
        if key in found and arguments.get("merge_duplicates"):
            before = found[key]
            found[key] = [*(before if isinstance(before, list) else [before]), value]
        else:
            found[key] = value
    return found


def _parse_lines(text: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    separator = arguments.get("kv_sep", ":")
    found = {}
    for line in text.split(arguments.get("line_sep", "\n")):
        key, is_pair, value = line.strip().partition(separator)
        if is_pair:
            found[key.strip()] = parse_value(value.strip(), arguments.get("value_parser"))
    return found


def _fill(transform: Any, scope: Mapping[str, Any]) -> Any:
    """Fill the placeholders of a transform. Raises ValueError for one that stands for nothing."""
    if isinstance(transform, dict):
        return {key: _fill(value, scope) for key, value in transform.items()}
    if isinstance(transform, list):
        return [_fill(value, scope) for value in transform]
    named = _PLACEHOLDER.fullmatch(transform) if isinstance(transform, str) else None
    if named is None:
        return transform
    value: Any = scope
    for key in named[1].split("."):
        if not isinstance(value, Mapping) or key not in value:
            raise ValueError(f"no {named[0]}")
        value = value[key]
    return value


def _load(spec: object) -> ResponseTemplate:
    if not isinstance(spec, dict):
        raise ValueError(f"got {type(spec).__name__}, wanted an object")
    if spec.get("version", 1) != 1:
        raise ValueError(f"got version {spec['version']!r}, wanted 1")
    if unknown := sorted(set(spec) - _TEMPLATE_KEYS):
        raise ValueError(f"unknown keys {unknown}")
    raw = spec.get("fields")
    if not isinstance(raw, dict) or not raw:
        raise ValueError("fields: wanted an object that is not empty")
    fields = {name: _load_field(f"fields.{name}", name, one) for name, one in raw.items()}
    outside = [name for name, field in fields.items() if field.opens is None]
    if len(outside) > 1:
        raise ValueError(f"fields: {outside} have no open; one at most may lack it")
    anchor, _ = _compile("start_anchor", spec, "start_anchor", "start_anchor_pattern")
    return ResponseTemplate(fields, anchor)


def _load_field(where: str, name: str, raw: object) -> Field:
    if not isinstance(raw, dict):
        raise ValueError(f"{where}: got {type(raw).__name__}, wanted an object")
    if unknown := sorted(set(raw) - _FIELD_KEYS):
        raise ValueError(f"{where}: unknown keys {unknown}")
    content, arguments = raw.get("content", "text"), raw.get("content_args", {})
    if content not in CONTENTS:
        raise ValueError(f"{where}.content: got {content!r}, wanted one of {sorted(CONTENTS)}")
    if not isinstance(arguments, dict):
        raise ValueError(f"{where}.content_args: got {type(arguments).__name__}, wanted an object")
    if content == "xml-inline" and "key" not in regex.compile(arguments.get("tag_pattern", "")).groupindex:
        raise ValueError(f"{where}.content_args.tag_pattern: wanted a pattern with a group `key`")
    opens, opens_can_grow = _compile(where, raw, "open", "open_pattern")
    closes, closes_can_grow = _compile(where, raw, "close", "close_pattern")
    transform, is_list = raw.get("transform"), raw.get("transform_each", False)
    tags = split_tag_pattern(arguments["tag_pattern"]) if content == "xml-inline" else None
    return Field(
        name, opens, opens_can_grow, closes, closes_can_grow, content, arguments, transform, bool(is_list), tags
    )  # fmt: skip


def _compile(where: str, raw: dict[str, Any], literal: str, pattern: str) -> tuple[Pattern | None, bool]:
    """Return the pattern, and whether a match at the end of a text may become longer."""
    if literal in raw and pattern in raw:
        raise ValueError(f"{where}: {literal} and {pattern}; wanted one of them")
    if pattern in raw:
        return regex.compile(raw[pattern], regex.DOTALL), True
    if literal not in raw:
        return None, False
    texts = [raw[literal]] if isinstance(raw[literal], str) else raw[literal]
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"{where}.{literal}: wanted a text or a list of texts, none of them empty")
    can_grow = any(one != other and one.startswith(other) for one in texts for other in texts)
    longest_first = sorted(texts, key=len, reverse=True)
    return regex.compile("|".join(map(regex.escape, longest_first)), regex.DOTALL), can_grow
