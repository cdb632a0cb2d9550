"""Read tool calls from the text of one region as it arrives: the name as soon as it is certain, arguments in pieces.

The region's field decides which reader is used. The joined pieces do not depend on how the text is cut. A call that has
begun stays a call, and its arguments are what the model wrote, even if that is not JSON. If text turns out not to be a
call, the reader is `broken`, and has reported nothing of it. If a limit cut the answer, a call whose name is complete
is reported with the arguments so far.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal, Protocol

import regex
from pydantic_core import from_json

from server.parsing.json_scanner import JsonScanner
from server.parsing.offered_tools import Tools
from server.parsing.response_template import (
    Field,
    encode_json,
    load_json,
    parse_content,
    parse_region,
    parse_value,
    write_json,
)
from server.parsing.tags import Argument

Ended = Literal["by itself", "with the answer", "by a limit"]  # how a region ended
Call = tuple[str, str]  # (name, ""): a call begins; ("", text): more of its arguments

_STRING = r'"(?:[^"\\]|\\.){0,1024}"'
_NAMED = r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?(?P<nested>"function"\s*:\s*\{\s*)?"name"\s*:\s*'
_NAME = regex.compile(rf"{_NAMED}(?P<name>{_STRING})")
_HEAD = regex.compile(rf'{_NAME.pattern}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{\s*["}}])')
_BEGUN = regex.compile(r'\s*(?=\{\s*["}])')
_CUT_KEY = regex.compile(r"(?<=[{,]\s*)[\w.-]+\Z")
_BETWEEN = regex.compile(r"[\s,;\[\]]*")
_ARGUMENTS = ("arguments", "parameters")
_WITHOUT_ARGUMENTS = {"name", "function", "type", "id", *_ARGUMENTS}  # members of a call that has none


class CallReader(Protocol):
    reads_specials: bool  # whether the region's special tokens are part of its text
    broken: bool

    def feed(self, text: str) -> list[Call]:
        """Take further text, and return the parts of calls that are certain now."""

    def add(self, argument: Argument, text: str) -> list[Call]:
        """Take an argument that was written between tags."""

    def close(self, ended: Ended) -> list[Call]:
        """End the region."""

    def rest(self) -> str:
        """Return the text after the last call of a broken region."""


def choose_reader(field: Field, captures: Mapping[str, str], tools: Tools, known_only: bool) -> CallReader:
    """Choose the reader of a field's calls. known_only: only names of offered tools make a call."""
    name: str = _PROBE_NAME
    arguments: dict[str, Any] = {"A": 1}
    has_plain_json = field.content == "json" and not field.arguments
    if has_plain_json and _probe(field, {**captures}, _call(name, arguments)) == (name, arguments):
        return JsonCalls(None, tools, known_only)
    named = _probe(field, captures, arguments)
    if named is not None and named[1] == arguments:
        if has_plain_json:
            return JsonCalls(named[0], tools, known_only)
        if field.tags is not None and not field.arguments.get("merge_duplicates"):
            return TaggedCall(named[0], field, tools, known_only)
    return WholeCalls(field, captures, tools, known_only)


def read_calls(value: Any) -> list[tuple[str, Any]]:
    """Return the names and arguments of one or more calls, in any of the shapes that models and templates use.

    Raises ValueError if the value is not a call.
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
    arguments: Any = next((value[key] for key in _ARGUMENTS if value.get(key) is not None), None)
    if arguments is None and not _WITHOUT_ARGUMENTS.issuperset(value):
        raise ValueError(f"wanted one of {_ARGUMENTS}")
    arguments = {} if arguments is None else arguments
    if isinstance(arguments, str):
        arguments = load_json(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise ValueError("wanted an object of arguments")
    return [(name, arguments)]


class JsonCalls:
    """Reads JSON objects with `name` and `arguments`, alone or in a list; with a captured name, only the arguments.

    Arguments that follow the name are passed on as they arrive. In any other order, a call is reported once it is
    complete.
    """

    reads_specials = False

    def __init__(self, name: str | None, tools: Tools, known_only: bool) -> None:
        self._given = name
        self._names = tools.parameters if known_only else None
        self.broken = name is not None and not self._knows(name)
        self._text = ""  # of an object that is not certain to be a call yet
        self._num_scanned = 0
        self._scanner = JsonScanner(0)
        self._state = "head"
        self._depth = 0  # of brackets around the arguments
        self._num_calls = 0

    def feed(self, text: str) -> list[Call]:
        calls: list[Call] = []
        while text and not self.broken:
            text = self._read_head(text, calls) if self._state == "head" else self._read_on(text, calls)
        self._text += text
        return calls

    def add(self, argument: Argument, text: str) -> list[Call]:
        return self.feed(text)

    def close(self, ended: Ended) -> list[Call]:
        if self.broken or self._state == "arguments":
            return []
        if self._state == "tail":
            self.broken = not self._is_tail("" if ended == "by a limit" else "}" * self._depth, ended == "by a limit")
            return []
        if ended == "by a limit":
            return self._cut_head() if self._text.strip() or self._given is not None else []
        self.broken = bool(self._text.strip()) or not self._num_calls
        return []

    def _cut_head(self) -> list[Call]:
        """Return the parts of a call that was cut before its arguments began, or with these before its name.

        Returns [] if the name is missing.
        """
        if self._given is not None:
            self.broken = bool(self._num_calls)
            return [] if self.broken else [(self._given, ""), ("", self._text.lstrip())]
        named = _NAME.match(self._text)
        if named is not None:
            return [(str(_string(named["name"])), "")]
        try:
            found = read_calls(from_json(self._text, allow_partial=True))
        except (ValueError, RecursionError):
            found = []
        if self._names is not None:
            names = "|".join(map(regex.escape, self._names))
            begins = regex.fullmatch(rf'{_NAMED}"(?:{names})"', self._text, partial=True)
            self.broken = begins is None and not all(self._knows(name) for name, _ in found)
        return [] if self.broken else [call for name, given in found for call in ((name, ""), ("", encode_json(given)))]

    def rest(self) -> str:
        return self._text

    def _read_head(self, text: str, calls: list[Call]) -> str:
        """Look for the beginning of a call. Returns the text from the beginning of its arguments on."""
        if self._given is None and not self._text:
            text = text[_BETWEEN.match(text).end() :]
        if self._given is not None and self._num_calls:
            text = text.lstrip()
        self._text += text
        begun = self._begun()
        if begun is not None:
            name, begin, self._depth = begun
            calls.append((name, ""))
            text, self._text = self._text[begin:], ""
            self._num_calls += 1
            self._state, self._scanner = "arguments", JsonScanner(0)
            return text
        end = None if self.broken else self._scanner.find_end(self._text, self._num_scanned)
        self._num_scanned = len(self._text)
        return "" if end is None else self._read_whole(end, calls)

    def _begun(self) -> tuple[str, int, int] | None:
        """Return a call's name, where its arguments begin, and the brackets around them; None before that."""
        if self._given is not None:
            match = None if self._num_calls else _BEGUN.match(self._text)
            return (self._given, match.end(), 0) if match else None
        named = _NAME.match(self._text)
        if named is None:
            return None
        name = _string(named["name"])
        if not name or not self._knows(name):
            self.broken = True
            return None
        match = _HEAD.match(self._text)
        return (name, match.end(), 2 if match["nested"] else 1) if match else None

    def _read_whole(self, end: int, calls: list[Call]) -> str:
        """Read a complete object: a call with its members in another order, or not a call. Returns the text
        after it.
        """
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
        """Continue inside a call: in its arguments, or after them in the object. Returns the text after that."""
        end = self._scanner.find_end(text, 0)
        if self._state == "arguments":
            calls.append(("", text[:end]))
        else:
            self._text += text[:end]
        if end is None:
            return ""
        self.broken = self._state == "tail" and not self._is_tail("", is_cut=False)
        if not self.broken:
            self._text = ""
            is_tail = self._state == "arguments" and self._depth > 0
            self._state = "tail" if is_tail else "head"
            self._scanner, self._num_scanned = JsonScanner(self._depth if is_tail else 0), 0
        return text[end:]

    def _is_tail(self, end: str, is_cut: bool) -> bool:
        """Return whether the text after the arguments, with `end`, completes their object, and is nothing else."""
        try:
            from_json('{"":' * self._depth + "0" + self._text + end, allow_partial=is_cut, allow_inf_nan=False)
        except ValueError:
            return False
        return True

    def _knows(self, name: str) -> bool:
        return self._names is None or name in self._names


class TaggedCall:
    """Reads one call with arguments between tags. Each argument is reported once complete, with its type in the
    schema.
    """

    reads_specials = True

    def __init__(self, name: str, field: Field, tools: Tools, known_only: bool) -> None:
        self.broken = known_only and name not in tools.parameters
        self._name = name
        self._tools = tools
        self._parser = field.arguments.get("value_parser")
        self._text = ""
        self._num_arguments = 0

    def feed(self, text: str) -> list[Call]:
        """Take text between arguments: whitespace is ignored, anything else ends the call."""
        self._text += text
        if not text.strip():
            return []
        self.broken = True
        return [("", "}")] if self._num_arguments else []

    def add(self, argument: Argument, text: str) -> list[Call]:
        self._text = ""
        calls: list[Call] = [] if self._num_arguments else [(self._name, "")]
        before = f"{', ' if self._num_arguments else '{'}{encode_json(argument.key)}: "
        self._num_arguments += 1
        if not argument.is_whole:
            return [*calls, ("", before + self._tools.begin_argument(self._name, argument.key, argument.value))]
        try:
            value = parse_value(argument.value, self._parser)
        except (ValueError, RecursionError):
            value = argument.value
        return [*calls, ("", before + encode_json(self._tools.argument(self._name, argument.key, value)))]

    def close(self, ended: Ended) -> list[Call]:
        if self._num_arguments:
            return [] if ended == "by a limit" else [("", "}")]
        if ended == "by itself":
            return [(self._name, ""), ("", "{}")]
        self.broken = ended == "with the answer"
        return [] if self.broken else [(self._name, "")]

    def rest(self) -> str:
        return self._text


class WholeCalls:
    """Reads calls in any other syntax. They are reported when the region ends."""

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

    def add(self, argument: Argument, text: str) -> list[Call]:
        return self.feed(text)

    def close(self, ended: Ended) -> list[Call]:
        try:
            found = read_calls(parse_region(self._field, self._text, self._captures))
        except (ValueError, RecursionError):
            found = []
        is_limited = ended == "by a limit"
        if is_limited and (not found or self._field.content != "json"):
            return self._cut_call()
        if not found or not self._know(name for name, _ in found):
            self.broken = True
            return []
        calls: list[Call] = []
        for name, arguments in found:
            typed = {key: self._tools.argument(name, key, value) for key, value in arguments.items()}
            calls += [(name, ""), ("", encode_json(typed))]
        return calls

    def _cut_call(self) -> list[Call]:
        """Return the call that the region's opening tag names, with the arguments so far; [] if it names none."""
        named = _probe(self._field, self._captures, {})
        if named is None:
            return []
        if not self._know([named[0]]):
            self.broken = True
            return []
        if self._field.content == "json":
            written = write_json(self._text.lstrip(), self._field.arguments)
            return [(named[0], ""), ("", _CUT_KEY.sub("", written))]
        read = parse_content(self._text, self._field.content, self._field.arguments)
        typed = {key: self._tools.argument(named[0], key, value) for key, value in read.items()}
        return [(named[0], ""), ("", encode_json(typed)[:-1])]

    def _know(self, names: Iterable[str]) -> bool:
        return not self._known_only or all(name in self._tools.parameters for name in names)

    def rest(self) -> str:
        return self._text


_PROBE_NAME = "probed"


def _call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "arguments": arguments, "parameters": arguments}


def _probe(field: Field, captures: Mapping[str, str], content: Any) -> tuple[str, Any] | None:
    """Return the one call that the field makes of this content; None if it does not make one."""
    plain = replace(field, content="json", arguments={})
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
