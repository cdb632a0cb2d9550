"""Replace formats that llguidance does not know by patterns: those that zod and OpenAI's helpers write.

If zod puts a pattern beside its own format, it is the same as here, character by character, so it is enforced once.
"""

from typing import Any

# RFC 4648 (padded, and for URLs without padding), E.164, and identifiers as zod 4 has them
PATTERNS = {
    "base64": "^$|^(?:[0-9a-zA-Z+/]{4})*(?:(?:[0-9a-zA-Z+/]{2}==)|(?:[0-9a-zA-Z+/]{3}=))?$",
    "base64url": "^(?:[A-Za-z0-9_-]{4})*(?:[A-Za-z0-9_-]{2,3})?$",
    "cuid": "^[cC][0-9a-z]{6,}$",
    "cuid2": "^[0-9a-z]+$",
    "e164": r"^\+[1-9]\d{6,14}$",
    "hex": "^[0-9a-fA-F]*$",
    "ksuid": "^[A-Za-z0-9]{27}$",
    "lowercase": "^[^A-Z]*$",
    "nanoid": "^[a-zA-Z0-9_-]{21}$",
    "ulid": "^[0-7][0-9A-HJKMNP-TV-Za-hjkmnp-tv-z]{25}$",
    "uppercase": "^[^a-z]*$",
    "xid": "^[0-9a-vA-V]{20}$",
    # RFC 7519: three texts in base64url, of which the first is a JSON object, so it begins with {"
    "jwt": r"^eyJ[\w-](?:[\w-]{4})*(?:[\w-]{2,3})?\.(?:[\w-]{4})+(?:[\w-]{2,3})?\.(?:[\w-]{4})*(?:[\w-]{2,3})?$",
}
_CHECKS = ("starts_with", "ends_with", "includes")  # zod's names for checks: what they check for is a pattern

# RFC 3986, section 4.2: a relative reference, whose host is a name or an IPv4 address, or else a URI
_ESCAPED = "%[0-9A-Fa-f]{2}"
_NAME = rf"(?:[\w.~!$&'()*+,;=-]|{_ESCAPED})"
_SEGMENT, _FIRST = rf"(?:[\w.~!$&'()*+,;=:@-]|{_ESCAPED})", rf"(?:[\w.~!$&'()*+,;=@-]|{_ESCAPED})"
_AUTHORITY = rf"(?:(?:{_NAME}|:)*@)?{_NAME}*(?::[0-9]*)?"
_PATHS = rf"//{_AUTHORITY}(?:/{_SEGMENT}*)*|/(?:{_SEGMENT}+(?:/{_SEGMENT}*)*)?|{_FIRST}+(?:/{_SEGMENT}*)*"
_TAIL = rf"(?:{_SEGMENT}|[/?])*"
_RELATIVE = rf"^(?:{_PATHS})?(?:\?{_TAIL})?(?:#{_TAIL})?$"
_URI_REFERENCE = "uri-reference"

OWN_FORMATS = (*PATTERNS, _URI_REFERENCE)


def rewrite_format(schema: dict[str, Any]) -> None:
    """Replace a format, or a `contentEncoding`, by a pattern, where it is one of these."""
    name = schema.get("format")
    if name == _URI_REFERENCE:
        _add(schema, {"anyOf": [{"format": "uri"}, {"pattern": _RELATIVE}]})
    elif isinstance(name, str) and name in PATTERNS:
        _add_pattern(schema, PATTERNS[name])
    elif name not in _CHECKS or not _has_pattern(schema):
        name = None
    if name is not None:
        del schema["format"]
    encoding = schema.get("contentEncoding")
    if encoding in ("base64", "base64url"):
        _add_pattern(schema, PATTERNS[encoding])


def _has_pattern(schema: dict[str, Any]) -> bool:
    others = schema.get("allOf")
    return "pattern" in schema or (
        isinstance(others, list) and any("pattern" in one for one in others if isinstance(one, dict))
    )


def _add_pattern(schema: dict[str, Any], pattern: str) -> None:
    if schema.setdefault("pattern", pattern) != pattern:
        _add(schema, {"pattern": pattern})


def _add(schema: dict[str, Any], more: dict[str, Any]) -> None:
    others = schema.get("allOf", [])
    if isinstance(others, list) and more not in others:
        schema["allOf"] = [*others, more]
