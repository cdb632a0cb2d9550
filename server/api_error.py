"""Make errors as OpenAI's clients expect them: a status and `{"error": {message, type, param, code}}`.

Every failure that a client sees is made here. The constructors name the cases, so routes say what went wrong and not
which number that is.
"""

import msgspec

OVERLOADED_TYPE = "rate_limit_error"
REQUEST_TYPE = "invalid_request_error"
SERVER_TYPE = "server_error"
UNSUPPORTED_GRAMMAR = "unsupported_grammar"

_MESSAGES_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """Report that a request cannot be served.

    `message` is one line for its sender; `param` names the field at fault.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.headers = headers or {}

    @property
    def type(self) -> str:
        if self.status == 429:
            return OVERLOADED_TYPE
        return SERVER_TYPE if self.status >= 500 else REQUEST_TYPE

    def messages_body(self) -> bytes:
        """Return the body of the error as Anthropic's clients expect it."""
        kind = _MESSAGES_TYPES.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": self.message}})

    def ollama_body(self) -> bytes:
        """Return the body of the error as Ollama's clients expect it: a text; what else is known stands beside it."""
        return msgspec.json.encode({"error": self.message, "param": self.param, "code": self.code})

    def body(self) -> bytes:
        error = {"message": self.message, "type": self.type, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})


class NoRoom(ApiError):
    """Report a 400: the prompt fits, but the prompt and the requested answer together exceed the context."""

    def __init__(self, param: str, num_prompt: int, num_asked: int, context: int) -> None:
        what = f"{num_prompt} tokens of prompt and {num_asked} of answer are {num_prompt + num_asked}"
        message = f"{param}: {what}, the context has {context}"
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.anthropic_message = (
            f"input length and `max_tokens` exceed context limit: {num_prompt} + {num_asked} > {context}, "
            "decrease input length or `max_tokens` and try again"
        )


class PromptTooLong(ApiError):
    """Report a 400: the prompt alone exceeds the context."""

    def __init__(self, param: str, num_prompt: str, context: int) -> None:
        """Build the message. `num_prompt`: a number, or `at least` and a number."""
        message = f"{param}: {num_prompt} tokens, the attention profile has room for {context} with the answer"
        super().__init__(400, message, param=param, code="context_length_exceeded")
        self.anthropic_message = f"prompt is too long: {num_prompt} tokens > {context} maximum"


def invalid(param: str | None, message: str, code: str | None = None) -> ApiError:
    """Return a 400 for a value of the field `param` that cannot be served. The message opens with the field's name."""
    return ApiError(400, f"{param}: {message}" if param else message, param=param, code=code)


def too_long(param: str, message: str) -> ApiError:
    return invalid(param, message, "context_length_exceeded")


def bad_key(message: str) -> ApiError:
    return ApiError(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})


def forbidden(message: str, code: str) -> ApiError:
    return ApiError(403, message, code=code)


def unknown_model(got: str, served: list[str]) -> ApiError:
    names = ", ".join(map(repr, served))
    return ApiError(
        404, f"model: {got!r} does not exist; this server has {names}", param="model", code="model_not_found"
    )


def body_too_large(limit_mib: float) -> ApiError:
    return ApiError(413, f"body: larger than {limit_mib:g} MiB (server.max_body_mib)", code="body_too_large")


def malformed(message: str) -> ApiError:
    """Return a 400 for bytes that are no HTTP request."""
    return ApiError(400, f"request: {message}", code="malformed_request")


def headers_too_large(most: int, most_bytes: int) -> ApiError:
    return ApiError(
        431, f"headers: more than {most}, or than {most_bytes // 1024} KiB of them", code="headers_too_large"
    )


def too_slow(part: str, seconds: float) -> ApiError:
    return ApiError(408, f"{part}: not complete after {seconds:g} s", code="request_timeout")


def time_up(seconds: float) -> ApiError:
    """Return a 408: the time limit passed before anything was generated. Clients do not retry it by themselves."""
    what = f"max_seconds: nothing was generated in {seconds:g} s, the most that this request may take"
    return ApiError(408, what, param="max_seconds", code="time_limit", headers={"x-should-retry": "false"})


def connections_full(most: int) -> ApiError:
    return unavailable(f"server: {most} connections are open (server.max_connections)", "too_many_connections", 1)


def queue_full(message: str, retry_after_seconds: int) -> ApiError:
    return ApiError(429, message, code="queue_full", headers={"retry-after": str(retry_after_seconds)})


def internal(message: str) -> ApiError:
    return ApiError(500, message, code="internal_error")


def unavailable(message: str, code: str, retry_after_seconds: int) -> ApiError:
    """Return a 503: the engine is loading or dead, or the server is draining."""
    return ApiError(503, message, code=code, headers={"retry-after": str(retry_after_seconds)})
