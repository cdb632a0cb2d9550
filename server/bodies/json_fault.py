"""Explain to a client why a body is not JSON: the place, the text there and what was probably meant.

Only the text around the decoder's error is read.
"""

import re

_AT = re.compile(r"^(?:JSON is malformed: )?(?P<what>.*) \(byte (?P<byte>\d+)\)$")
_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB][0-9a-fA-F]{2}(?!\\u[dD][c-fC-F])|[c-fC-F][0-9a-fA-F]{2})")
_CONTEXT = 24  # characters that are shown from the place on

_MEANT = (
    (re.compile(rb"-?NaN|-?nan"), "NaN is not JSON; leave the field out or send null"),
    (re.compile(rb"-?Infinity|-?inf"), "Infinity is not JSON; leave the field out or send null"),
    (re.compile(rb"True|False"), "true and false are written in small letters"),
    (re.compile(rb"None"), "None is null in JSON"),
    (re.compile(rb"'"), "strings stand in double quotes"),
    (re.compile(rb"//|/\*|#"), "JSON has no comments"),
    (re.compile(rb"\xef\xbb\xbf"), "the text begins with a byte order mark; leave it out"),
    (re.compile(rb"[\x00-\x1f]"), "a control character inside a string is written as an escape, a line's end as \\n"),
)


def describe_fault(raw: bytes, message: str) -> str:
    """Explain in one line why `raw` is not JSON. message: msgspec's error."""
    if not raw.strip():
        return "empty; wanted a JSON object"
    found = _AT.match(message)
    if found is None:
        surrogate = _LONE_SURROGATE.search(raw)
        if surrogate is not None:
            return (
                f"{_where(raw, surrogate.start())}: {surrogate[0][:6].decode()} is half a character (a lone surrogate)"
            )
        return f"not valid JSON: it ends before it is complete, after {_show(raw[-_CONTEXT:])}"
    what, at = found["what"], int(found["byte"])
    if "surrogate" in what:
        what = "half a character (a lone surrogate)"
    else:
        what = next((meant for start, meant in _MEANT if start.match(raw, at)), what)
    return f"{_where(raw, at)}: {what}"


def _where(raw: bytes, at: int) -> str:
    before = raw[:at]
    line, column = before.count(b"\n") + 1, at - (before.rfind(b"\n") + 1) + 1
    return f"not valid JSON at line {line}, column {column}, {_show(raw[at : at + _CONTEXT])}"


def _show(piece: bytes) -> str:
    """Return bytes of the text, quoted, on one line; what is no UTF-8 is escaped."""
    return repr(piece.decode(errors="backslashreplace"))
