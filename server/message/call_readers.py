"""Calls of tools, read from the text of one region as it comes: the name as soon as it is certain, arguments in pieces.

Which of the readers a region has is told by its field. Knows nothing of what is around the region. Invariants: however
the text is cut, the pieces joined are the same; a call that has begun stays one, and its arguments are what the model
wrote, also where they are no JSON; what is not certain to be a call is `broken`, and then nothing of it has been told.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import regex

from server.message.json_scanner import JsonScanner
from server.message.response_template import Field, load_json, parse_region, parse_value
from server.message.tools import Tools, encode_json

Call = tuple[str, str]  # a name and no text: it begins; "" and a text: more of its arguments

_STRING = r'"(?:[^"\\]|\\.){0,1024}"'
_NAME = regex.compile(rf'\s*\{{\s*"name"\s*:\s*({_STRING})')
_HEAD = regex.compile(rf'{_NAME.pattern}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{\s*["}}])')
_BEGUN = regex.compile(r'\s*(?=\{\s*["}])')
_BETWEEN = regex.compile(r"[\s,;\[\]]*")
_ARGUMENTS = ("arguments", "parameters")


class CallReader(Protocol):
    reads_specials: bool  # the region's special tokens are part of its text
    broken: bool

    def feed(self, text: str) -> list[Call]:
        """What became certain."""

    def close(self, is_cut: bool) -> list[Call]:
        """The region has ended, or the answer has inside it."""

    def rest(self) -> str:
        """Of a broken region, what is behind its last call."""


def choose_reader(field: Field, captures: Mapping[str, str], tools: Tools, known_only: bool) -> CallReader:
    """known_only: names of tools that the request does not offer are none."""
    name: str = _PROBE_NAME
    arguments: dict[str, Any] = {"A": 1}
    has_plain_json = field.content == "json" and not field.arguments
    if has_plain_json and _probe(field, {**captures}, _call(name, arguments)) == (name, arguments):
        return JsonCalls(None, tools, known_only)
    named = _probe(field, captures, arguments)
    if named is not None and named[1] == arguments and (not known_only or named[0] in tools.parameters):
        if has_plain_json:
            return JsonCalls(named[0], tools, known_only)
        if field.content == "xml-inline" and not field.arguments.get("merge_duplicates"):
            return TaggedCall(named[0], field, tools)
    return WholeCalls(field, captures, tools, known_only)


def read_calls(value: Any) -> list[tuple[str, Any]]:
    """Names and arguments of one call, or several, in any of the shapes that models and templates give them.

    Raises ValueError for what is none.
    """
    if isinstance(value, list):
        return [call for item in value for call in read_calls(item)]
    if not isinstance(value, dict):
        raise ValueError("wanted an object")
    if isinstance(value.get("function"), dict):
        return read_calls(value["function"])
    name = value.get("name") or value.get("function")
    if not isinstance(name, str) or not name:
        raise ValueError("wanted a name")
    arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), {})
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("wanted an object of arguments")
    return [(name, arguments)]


class JsonCalls:
    """JSON objects with `name` and `arguments`, one, several or a list; of a captured name, the arguments alone.

    Arguments that follow the name are passed on as they come; in any other order a call is told once it is whole.
    """

    reads_specials = False

    def __init__(self, name: str | None, tools: Tools, known_only: bool) -> None:
        self.broken = False
        self._given = name
        self._names = tools.parameters if known_only else None
        self._text = ""  # of the object that has not become a call
        self._num_scanned = 0
        self._scanner = JsonScanner(0)
        self._state = "head"
        self._num_calls = 0

    def feed(self, text: str) -> list[Call]:
        calls: list[Call] = []
        while text and not self.broken:
            text = self._read_head(text, calls) if self._state == "head" else self._read_on(text, calls)
        self._text += text
        return calls

    def close(self, is_cut: bool) -> list[Call]:
        del is_cut
        if self._state == "head" and (self._text.strip() or not self._num_calls):
            self.broken = True
        return []

    def rest(self) -> str:
        return self._text

    def _read_head(self, text: str, calls: list[Call]) -> str:
        """Look for a call's beginning in what is there. Returns the text that is left once its arguments begin."""
        if self._given is None and not self._text:
            text = text[_BETWEEN.match(text).end() :]
        if self._given is not None and self._num_calls:
            text = text.lstrip()
        self._text += text
        begun = self._begun()
        if begun is not None:
            name, begin = begun
            calls.append((name, ""))
            text, self._text = self._text[begin:], ""
            self._num_calls += 1
            self._state, self._scanner = "arguments", JsonScanner(0)
            return text
        end = None if self.broken else self._scanner.find_end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        return "" if end is None else self._read_whole(end, calls)

    def _begun(self) -> tuple[str, int] | None:
        """The name of a call whose arguments begin, and where they do."""
        if self._given is not None:
            match = None if self._num_calls else _BEGUN.match(self._text)
            return (self._given, match.end()) if match else None
        named = _NAME.match(self._text)
        if named is None:
            return None
        name = _string(named[1])
        if not name or not self._knows(name):
            self.broken = True
            return None
        match = _HEAD.match(self._text)
        return (name, match.end()) if match else None

    def _read_whole(self, end: int, calls: list[Call]) -> str:
        """A whole object in which nothing began: in another order, or no call. Returns what follows it."""
        try:
            found = [] if self._given is not None else read_calls(load_json(self._text[:end]))
        except (ValueError, RecursionError):
            found = []
        if not found or not all(self._knows(name) for name, _ in found):
            self.broken = True
            return ""
        for name, arguments in found:
            calls += [(name, ""), ("", encode_json(arguments))]
        self._num_calls += len(found)
        text, self._text = self._text[end:], ""
        self._num_scanned, self._scanner = 0, JsonScanner(0)
        return text

    def _read_on(self, text: str, calls: list[Call]) -> str:
        """Inside a call: its arguments, or what stands behind them in the object. Returns what follows."""
        end = self._scanner.find_end(text, 0)
        if self._state == "arguments":
            calls.append(("", text[:end]))
        if end is None:
            return ""
        is_tail = self._state == "arguments" and self._given is None
        self._state = "tail" if is_tail else "head"
        self._scanner, self._num_scanned = JsonScanner(1 if is_tail else 0), 0
        return text[end:]

    def _knows(self, name: str) -> bool:
        return self._names is None or name in self._names


class TaggedCall:
    """One call whose arguments are marked one by one: each is told once it is whole, as its type in the schema."""

    reads_specials = True

    def __init__(self, name: str, field: Field, tools: Tools) -> None:
        self.broken = False
        self._name = name
        self._tools = tools
        self._tag = regex.compile(field.arguments["tag_pattern"], regex.DOTALL)
        self._closing = closing_text(field.arguments["tag_pattern"])
        self._parser = field.arguments.get("value_parser")
        self._text = ""
        self._num_arguments = 0

    def feed(self, text: str) -> list[Call]:
        """The text is searched where an argument may end in what is new: a long value is not read again and again."""
        first = max(0, len(self._text) - len(self._closing) + 1)
        self._text += text
        calls: list[Call] = []
        at = 0
        while not self.broken and self._closing in self._text[max(first, at) :]:
            match = self._tag.search(self._text, at, partial=True)
            if match is None or match.partial or match.end() == match.start():
                break
            self._add(self._text[at : match.start()], match.groupdict(), calls)
            at = match.end()
        self._text = self._text if self.broken else self._text[at:]
        return calls

    def close(self, is_cut: bool) -> list[Call]:
        if not self._num_arguments:
            self.broken = self.broken or is_cut or bool(self._text.strip())
            return [] if self.broken else [(self._name, ""), ("", "{}")]
        return [] if is_cut and self._text.strip() else [("", "}")]

    def rest(self) -> str:
        return self._text

    def _add(self, before: str, groups: dict[str, str | None], calls: list[Call]) -> None:
        """One argument; `before` it should be nothing."""
        try:
            value = parse_value(groups.get("value") or "", self._parser)
        except (ValueError, RecursionError):
            value = groups.get("value") or ""
        if not self._num_arguments:
            if before.strip():
                self.broken = True
                return
            calls.append((self._name, ""))
        key = str(groups["key"])
        typed = encode_json(self._tools.argument(self._name, key, value))
        calls.append(("", f"{', ' if self._num_arguments else '{'}{encode_json(key)}: {typed}"))
        self._num_arguments += 1


class WholeCalls:
    """Calls of any other form, told when the region ends."""

    reads_specials = True

    def __init__(self, field: Field, captures: Mapping[str, str], tools: Tools, known_only: bool) -> None:
        self.broken = False
        self._field = field
        self._captures = captures
        self._tools = tools
        self._known_only = known_only
        self._text = ""

    def feed(self, text: str) -> list[Call]:
        self._text += text
        return []

    def close(self, is_cut: bool) -> list[Call]:
        del is_cut
        try:
            found = read_calls(parse_region(self._field, self._text, self._captures))
        except (ValueError, RecursionError):
            found = []
        if not found or (self._known_only and not all(name in self._tools.parameters for name, _ in found)):
            self.broken = True
            return []
        calls: list[Call] = []
        for name, arguments in found:
            typed = {key: self._tools.argument(name, key, value) for key, value in arguments.items()}
            calls += [(name, ""), ("", encode_json(typed))]
        return calls

    def rest(self) -> str:
        return self._text


def closing_text(pattern: str) -> str:
    """The plain text that every match of a pattern ends with; "" where that cannot be told, or there is none."""
    plain = None if "|" in pattern or _NOT_PLAIN.search(pattern) else _PLAIN_END.search(pattern)
    return "" if plain is None else str(plain[0])


_NOT_PLAIN = regex.compile(r"\\(?![\WnrtsSdDwW])|\(\?(?![P:=!<])")  # escapes of several characters, and flags
_PLAIN_END = regex.compile(r"(?<!\\)[^\\.^$*+?{}()\[\]|]*\Z")
_PROBE_NAME = "probed"


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "parameters": arguments}


def _probe(field: Field, captures: Mapping[str, str], content: Any) -> tuple[str, Any] | None:
    """What call the field makes of a content that it has parsed; None if it makes none of it."""
    plain = Field(field.name, None, False, None, False, "json", {}, field.transform, field.is_list)
    try:
        given = encode_json([content] if field.is_list else content)
        calls = read_calls(parse_region(plain, given, captures))
    except (ValueError, RecursionError):
        return None
    return calls[0] if len(calls) == 1 else None


def _string(text: str) -> str | None:
    try:
        value = load_json(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
