"""Read request bodies: from the connection to a struct, after a check of every field against the body's table.

Wrong types, NaN, invalid UTF-8 and lone surrogates end as a 400 that names the field. Ranges and combinations are
checked by the route. No more of a body is in memory than the memory that all bodies share allows.
"""

from typing import Any

import msgspec
from starlette.requests import Request

from server.api_error import ApiError, invalid
from server.bodies.body_memory import BodyMemory
from server.bodies.fields import Body, Fields, check_nested
from server.bodies.json_fault import describe_fault
from server.bodies.json_size import check_json_size
from server.bodies.literals import literals_at
from server.deployment import ServerConfig
from server.text.text_pool import TextPool

_INLINE_BYTES = 64 * 1024  # of a body that is decoded at once: milliseconds, whatever it holds


async def read_body(
    request: Request, table: Fields[Body], memory: BodyMemory, texts: TextPool, settings: ServerConfig
) -> Body:
    """Read and decode a JSON body. Raises ApiError 413 (before the body is in memory), 415, 429, 503 and 400."""
    media = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media != "application/json" and not media.endswith("+json"):
        raise ApiError(415, f"content-type: got {media!r}, wanted application/json", code="unsupported_media_type")
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise ApiError(
            415, f"content-encoding: got {encoding!r}, wanted an uncompressed body", code="unsupported_encoding"
        )
    declared = request.headers.get("content-length", "0")
    memory.check(int(declared) if declared.isdigit() and len(declared) < 20 else 0)
    raw = bytearray()
    try:
        async for piece in request.stream():
            memory.check(len(raw) + len(piece))
            memory.take(len(piece))
            raw += piece
        size = len(raw) if len(raw) > _INLINE_BYTES else 0
        ignored = None if refuses_unknown(settings, table) else request.state.ignored
        return await texts.run(size, decode_body, bytes(raw), table, ignored)
    finally:
        memory.give(len(raw))


def refuses_unknown(settings: ServerConfig, table: Fields[Any]) -> bool:
    """Return whether a field of this body that its table lacks is an error."""
    if settings.unknown_fields == "auto":
        return table.replace_unknown is None
    return settings.unknown_fields == "refuse"


def decode_body(raw: bytes, table: Fields[Body], ignored: list[str] | None) -> Body:
    """Return the struct of a JSON text. What is unknown in it is added to `ignored`, and an error if that is None.

    Raises ApiError 400.
    """
    check_json_size(raw)
    try:
        nested = table.check_names(raw, "", ignored)
        body = _decode_typed(raw, table, ignored)
        check_nested(nested, ignored)
        return body
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".").partition("[...]")[0] or None
        if "required field" in what and "[...]" not in path:
            param = ".".join(filter(None, (param, what.split("`")[1])))
            what = "missing"
        what = what.replace("`", "").replace(" | null", "")
        what = _name_literals(what, table.struct, path.rstrip("`"))
        raise invalid(param or "body", what[0].lower() + what[1:]) from None
    except UnicodeDecodeError as error:
        raise invalid("body", f"not valid UTF-8 ({error.reason})") from None
    except RecursionError:
        raise invalid("body", "nested too deeply") from None
    except msgspec.DecodeError as error:
        raise invalid("body", describe_fault(raw, str(error))) from None


def _name_literals(what: str, wanted: type, path: str) -> str:
    """Return what msgspec says of a value that the type does not list, with the values that it lists."""
    got = what.removeprefix("Invalid enum value ").removeprefix("Invalid value ")
    literals = literals_at(wanted, path) if got != what else []
    if not literals:
        return what
    *others, last = [repr(value) for value in literals]
    return f"got {got}, wanted {', '.join(others) + ' or ' if others else ''}{last}"


def _decode_typed(raw: bytes, table: Fields[Body], ignored: list[str] | None) -> Body:
    """Decode into the struct; where an integer is wanted, 16.0 is one (JSON knows one kind of number)."""
    replaces = table.replace_unknown if ignored is not None else None
    try:
        return msgspec.json.decode(raw, type=table.struct)
    except msgspec.ValidationError as error:
        if replaces is None and "got `float`" not in str(error):
            raise
        tree, fault = msgspec.json.decode(raw), error
    if replaces is not None and ignored is not None:
        try:
            tree = replaces(tree, ignored)
            return msgspec.convert(tree, type=table.struct)
        except msgspec.ValidationError as error:
            fault = error
    if "got `float`" not in str(fault):
        raise fault
    return msgspec.convert(_with_integers(tree), type=table.struct)


def _with_integers(tree: Any) -> Any:
    """Return the tree with integers for whole floats, if any field could hold one so large."""
    if isinstance(tree, float) and tree.is_integer() and abs(tree) < 2**64:
        return int(tree)
    if isinstance(tree, list):
        return [_with_integers(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _with_integers(value) for key, value in tree.items()}
    return tree
