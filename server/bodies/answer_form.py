"""Read the structured output that a body asks for, by OpenAI's names or by vLLM's.

A checked body asks for one form or none.
"""

from typing import Any

import msgspec

from server.api_error import invalid

RESPONSE_FORMATS = ("text", "json_object", "json_schema")
FORMS = ("json", "regex", "choice", "grammar", "json_object")


class JsonSchema(msgspec.Struct, kw_only=True):
    """A schema by OpenAI's names. It is always strict, whatever `strict` says."""

    schema: Any = None
    name: str | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, kw_only=True):
    type: str | None = None
    json_schema: JsonSchema | None = None


class StructuredOutputs(msgspec.Struct, kw_only=True):
    """A form by vLLM's names, exactly one of which is given. `json`: a schema, or its text."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def check_form(by_openai: ResponseFormat | None, by_vllm: StructuredOutputs | None) -> None:
    """Check that one form at most is given, and whole. Raises ApiError 400."""
    if by_openai is not None:
        if by_openai.type not in RESPONSE_FORMATS:
            served = ", ".join(map(repr, RESPONSE_FORMATS))
            got = "missing" if by_openai.type is None else f"got {by_openai.type[:80]!r}"
            raise invalid("response_format.type", f"{got}, wanted one of {served}")
        if by_openai.type == "json_schema" and (by_openai.json_schema is None or by_openai.json_schema.schema is None):
            raise invalid("response_format.json_schema.schema", "missing; wanted a JSON schema")
    if by_vllm is None:
        return
    given = _given(by_vllm)
    if len(given) != 1:
        raise invalid("structured_outputs", f"got {' and '.join(given) or 'none'}, wanted one of {', '.join(FORMS)}")
    if by_openai is not None and by_openai.type != "text":
        what = f"got {given[0]} beside response_format of type {by_openai.type!r}, wanted one of the two"
        raise invalid("structured_outputs", what)


def form_param(by_openai: ResponseFormat | None, by_vllm: StructuredOutputs | None) -> str:
    """Return the field of a checked body that gives the form, "" without one."""
    if by_vllm is not None:
        return f"structured_outputs.{_given(by_vllm)[0]}"
    if by_openai is None or by_openai.type == "text":
        return ""
    return "response_format.json_schema.schema" if by_openai.type == "json_schema" else "response_format"


def _given(by_vllm: StructuredOutputs) -> list[str]:
    given = [name for name in FORMS if getattr(by_vllm, name) is not None]
    return [name for name in given if name != "json_object" or by_vllm.json_object]
