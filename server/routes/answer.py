"""What all answers share: their base, counts, and the error that may come instead of one.

Answers themselves are written where they come from; nothing here, or beside it, is ever filled in: `/openapi.json` is
made of these types, and a test holds every answer to them. Invariant: unknown fields are errors, so an answer that
grows a field is noticed.
"""

from typing import Annotated, Literal

import msgspec

Count = Annotated[int, msgspec.Meta(ge=0)]


class Answer(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Every field comes, unless it has a default."""


class ErrorDetail(Answer):
    message: str
    type: Literal["invalid_request_error", "rate_limit_error", "server_error"]
    param: str | None
    code: str | None


class Error(Answer):
    error: ErrorDetail
