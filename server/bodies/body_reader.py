"""Reads request bodies: from the connection to the struct, all of whose fields are known, or all used.

A body is decoded straight into a msgspec struct: wrong types, NaN, invalid UTF-8 and lone surrogates end as a 400 that
names the field. Refuses to know what fields mean; ranges and combinations are checked by who asked for the body.
Invariant: no more of a body is in memory than the room that all bodies share has given.
"""

from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from server.api_error import ApiError, invalid
from server.bodies import field_table
from server.bodies.answer_form import JsonSchema, ResponseFormat, StructuredOutputs
from server.bodies.body_memory import BodyRoom
from server.bodies.chat_message import CalledFunction, Message, MessageCall, Part
from server.bodies.chat_tools import AllowedTools, ChosenTool, Custom, Function, NamedFunction, NamedTool, Tool
from server.bodies.fields import Fields, look_into
from server.bodies.generation_bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    DocumentBody,
    FusionChoice,
    InlineDocument,
    StreamOptions,
    TokenizeBody,
)
from server.bodies.json_fault import describe_fault
from server.bodies.json_size import check_json_size
from server.bodies.literals import literals_at
from server.bodies.translated_bodies import CountTokensBody, MessagesBody, OtherBody, ResponsesBody
from server.bodies.unknown_variants import replace_unknown
from server.bodies.vector_bodies import EmbeddingsBody, RankedText, RerankBody
from server.deployment import ServerConfig
from server.text.text_pool import TextPool

_INLINE_BYTES = 64 * 1024  # of a body that is decoded at once: milliseconds, whatever it holds

Body = TypeVar("Body", bound=msgspec.Struct)

FIELDS: dict[type[msgspec.Struct], Fields] = {
    CompletionBody: field_table.COMPLETION,
    ChatBody: field_table.CHAT,
    TokenizeBody: field_table.TOKENIZE,
    DetokenizeBody: field_table.DETOKENIZE,
    ResponsesBody: field_table.RESPONSES,
    MessagesBody: field_table.MESSAGES,
    CountTokensBody: field_table.COUNT_TOKENS,
    EmbeddingsBody: field_table.EMBEDDINGS,
    RerankBody: field_table.RERANK,
    RankedText: field_table.RANKED_TEXT,
    DocumentBody: field_table.DOCUMENT,
    InlineDocument: field_table.INLINE_DOCUMENT,
    FusionChoice: field_table.FUSION,
    StreamOptions: field_table.STREAM_OPTIONS,
    ResponseFormat: field_table.RESPONSE_FORMAT,
    JsonSchema: field_table.JSON_SCHEMA,
    StructuredOutputs: field_table.STRUCTURED_OUTPUTS,
    Message: field_table.MESSAGE,
    MessageCall: field_table.MESSAGE_CALL,
    CalledFunction: field_table.CALLED_FUNCTION,
    Part: field_table.PART,
    ChosenTool: field_table.CHOSEN_TOOL,
    AllowedTools: field_table.ALLOWED_TOOLS,
    NamedTool: field_table.NAMED_TOOL,
    NamedFunction: field_table.NAMED_FUNCTION,
    Tool: field_table.TOOL,
    Function: field_table.FUNCTION,
    Custom: field_table.CUSTOM,
}


async def read_body(
    request: Request, wanted: type[Body], room: BodyRoom, texts: TextPool, settings: ServerConfig
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
    room.check(int(declared) if declared.isdigit() and len(declared) < 20 else 0)
    raw = bytearray()
    try:
        async for piece in request.stream():
            room.check(len(raw) + len(piece))
            room.take(len(piece))
            raw += piece
        size = len(raw) if len(raw) > _INLINE_BYTES else 0
        ignored = None if refuses_unknown(settings, wanted) else request.state.ignored
        return await texts.run(size, decode_body, bytes(raw), wanted, ignored)
    finally:
        room.give(len(raw))


def refuses_unknown(settings: ServerConfig, wanted: type[msgspec.Struct]) -> bool:
    """Return whether a field of this body that no table has is an error. Vendors add fields to the bodies of
    `OtherBody` with each release of their own clients; elsewhere such a field is a typing error.
    """
    if settings.unknown_fields == "auto":
        return not issubclass(wanted, OtherBody)
    return settings.unknown_fields == "refuse"


def decode_body(raw: bytes, wanted: type[Body], ignored: list[str] | None) -> Body:
    """Return the struct of a JSON text. What is unknown in it is added to `ignored`, and an error if that is None.
    Raises ApiError 400.
    """
    check_json_size(raw)
    try:
        nested = FIELDS[wanted].look(raw, "", ignored)
        body = _decode_typed(raw, wanted, ignored)
        look_into(nested, ignored)
        return body
    except msgspec.ValidationError as error:
        what, _, path = str(error).partition(" - at `$")
        param = path.rstrip("`").lstrip(".").partition("[...]")[0] or None
        if "required field" in what and "[...]" not in path:
            param = ".".join(filter(None, (param, what.split("`")[1])))
            what = "missing"
        what = what.replace("`", "").replace(" | null", "")
        what = _name_literals(what, wanted, path.rstrip("`"))
        raise invalid(param or "body", what[0].lower() + what[1:]) from None
    except UnicodeDecodeError as error:
        raise invalid("body", f"not valid UTF-8 ({error.reason})") from None
    except RecursionError:
        raise invalid("body", "nested too deeply") from None
    except msgspec.DecodeError as error:
        raise invalid("body", describe_fault(raw, str(error))) from None


def _name_literals(what: str, wanted: type, path: str) -> str:
    """What msgspec says of a value that is none of those that the type names, with their names."""
    got = what.removeprefix("Invalid enum value ").removeprefix("Invalid value ")
    literals = literals_at(wanted, path) if got != what else []
    if not literals:
        return what
    *others, last = [repr(value) for value in literals]
    return f"got {got}, wanted {', '.join(others) + ' or ' if others else ''}{last}"


def _decode_typed(raw: bytes, wanted: type[Body], ignored: list[str] | None) -> Body:
    """Decode into the struct; where an integer is wanted, 16.0 is one (JSON knows one kind of number)."""
    try:
        return msgspec.json.decode(raw, type=wanted)
    except msgspec.ValidationError as error:
        is_own = ignored is not None and issubclass(wanted, OtherBody)
        if not is_own and "got `float`" not in str(error):
            raise
        tree, fault = msgspec.json.decode(raw), error
    if ignored is not None and issubclass(wanted, OtherBody):
        try:
            tree = replace_unknown(tree, issubclass(wanted, ResponsesBody), ignored)
            return msgspec.convert(tree, type=wanted)
        except msgspec.ValidationError as error:
            fault = error
    if "got `float`" not in str(fault):
        raise fault
    return msgspec.convert(_with_integers(tree), type=wanted)


def _with_integers(tree: Any) -> Any:
    """The same tree with integers for the floats that are whole, if any field could take one so large."""
    if isinstance(tree, float) and tree.is_integer() and abs(tree) < 2**64:
        return int(tree)
    if isinstance(tree, list):
        return [_with_integers(item) for item in tree]
    if isinstance(tree, dict):
        return {key: _with_integers(value) for key, value in tree.items()}
    return tree
