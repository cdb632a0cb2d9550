"""Define the base of all answer types, and the error that may come instead of an answer.

Handlers write answers as plain trees. `/openapi.json` is made of these types, and a test holds every answer to them;
unknown fields are errors, so an answer that grows a field is noticed.
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """The base of answers. Every field without a default is always present."""


class CachedFrom(Answer):
    """Count cached tokens by where they were: pages of the device, host memory, the disk."""

    card: Count
    host: Count
    disk: Count


class PassedOver(Answer):
    """Count tokens on disk that were computed all the same, by the reason."""

    computing_is_faster: Count
    reads_paused: Count


class ErrorDetail(Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail
