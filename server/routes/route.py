"""Declare a route: its method, path, body, answers and errors, and the coroutine that answers it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from server.api_error import invalid
from server.bodies.body_reader import read_body
from server.bodies.fields import Body, Fields
from server.bodies.ranges import MOST_SECONDS
from server.bodies.schema_limits import BodyLimits, Tree
from server.generation.time_limit import TIME_HEADER
from server.loading.model_registry import ModelRegistry
from server.loading.served_model import ServedModel
from server.routes.answer import Error
from server.routes.load_wait import IdleLine, answer_loaded
from server.service.service import Service

MODEL_QUERY = "model"  # of routes without a body
READ_ERRORS = (401, 403, 404, 408, 431, 503)
BODY_ERRORS = (400, 401, 403, 404, 408, 413, 415, 429, 431, 503)
ENGINE_ERRORS = (*BODY_ERRORS, 500)
TIME_PARAMETER: Tree = {
    "name": TIME_HEADER,
    "in": "header",
    "schema": {"type": "number", "exclusiveMinimum": 0, "maximum": MOST_SECONDS},
    "description": "as `max_seconds`; the least counts",
}


@dataclass(frozen=True, slots=True)
class Call(Generic[Body]):
    """One request to a route. body: decoded; a route without a body must not read it. model: the one that the body, or
    the query's `model`, names.
    """

    request: Request
    models: ModelRegistry
    model: ServedModel
    body: Body

    @property
    def service(self) -> Service:
        return self.model.service

    @property
    def owner(self) -> str:
        """Return the name under which the request's key keeps documents and responses."""
        owner: str = self.request.state.document_owner
        return owner

    @property
    def is_administrator(self) -> bool:
        """Return whether the request's key may see and delete what other keys have saved."""
        return bool(self.request.state.is_administrator)

    @property
    def cache_salt(self) -> str:
        """Return the salt that separates the cached prefixes of the request's key."""
        salt: str = self.request.state.cache_salt
        return salt

    @property
    def waited_seconds(self) -> float:
        """Return how long the request has waited for its model."""
        seconds: float = getattr(self.request.state, "waited_seconds", 0.0)
        return seconds

    def path_value(self, name: str) -> str:
        value: str = self.request.path_params[name]
        return value

    def page_limit(self, most: int, default: int) -> int:
        """Return the query's `limit`. Raises ApiError 400."""
        given = self.request.query_params.get("limit")
        if given is None:
            return default
        if not (given.isascii() and given.isdigit() and len(given) < 10 and 1 <= int(given) <= most):
            raise invalid("limit", f"got {given[:80]!r}, wanted from 1 to {most}")
        return int(given)


Handler = Callable[[Call[Any]], Awaitable[Response | Tree]]


def _always(_: object) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Route:
    """One method of a path. The router, `/openapi.json` and the tables of `docs/API.md` are generated from it.

    handler: returns a response, or a tree that becomes JSON.
    answer: the type of that JSON; None for text.
    event: the type of a stream's events. line: that of its lines. idle_line: writes an empty line for keepalives.
    error: the type of an error. unavailable: that of a 503, if it differs.
    parameters: of the path and the query, in OpenAPI's format.
    check: refuses a call before its body is read.
    is_body_optional: a missing body counts as one without fields.
    needs_engine: whether, for a given body, the model must be loaded.
    is_open: needs no key, and answers during a drain.
    summary: a route without one is not described.
    """

    method: Literal["get", "post", "delete"]
    path: str
    handler: Handler
    summary: str = ""
    answer: type | None = None
    body: Fields[Any] | None = None
    example: Tree = field(default_factory=dict)
    event: type | None = None
    errors: tuple[int, ...] = READ_ERRORS
    error: type = Error
    unavailable: type | None = None
    parameters: tuple[Tree, ...] = ()
    operation_id: str = ""
    check: Callable[[Service], None] | None = None
    is_offered: Callable[[BodyLimits], bool] | None = None
    is_body_optional: bool = False
    is_open: bool = False
    line: type | None = None
    needs_engine: Callable[[Any], bool] = _always
    idle_line: IdleLine | None = None

    async def answer_request(self, request: Request) -> Response:
        """Read the body, find its model, have that loaded if the route needs it, and answer. Raises ApiError."""
        models = models_of(request)
        first = models.first.service
        if self.check is not None and len(models.models) == 1:
            self.check(first)  # before a body is read
        body: Any = None
        asked = request.query_params.get(MODEL_QUERY)
        if self.body is not None and self.is_body_optional and not _has_body(request):
            body = self.body.struct()
        elif self.body is not None:
            body = await read_body(request, self.body, first.body_memory, first.texts, first.settings)
        model = models.find(asked if body is None or body.model is None else body.model)
        if self.check is not None:
            self.check(model.service)
        call = Call(request, models, model, body)
        if body is None or not self.needs_engine(body):
            return await self._answer(call)
        return await answer_loaded(call, partial(self._answer, call), self.idle_line)

    async def _answer(self, call: Call[Any]) -> Response:
        answer = await self.handler(call)
        return answer if isinstance(answer, Response) else json_response(answer)


def models_of(request: Request) -> ModelRegistry:
    models = request.app.state.models
    assert isinstance(models, ModelRegistry)
    return models


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def path_parameter(name: str, schema: Tree) -> Tree:
    return {"name": name, "in": "path", "required": True, "schema": schema}


def query_parameter(name: str, schema: Tree) -> Tree:
    return {"name": name, "in": "query", "schema": schema}


OF_MODEL = (query_parameter(MODEL_QUERY, {"type": "string"}),)


def page_parameter(most: int, default: int) -> Tree:
    return query_parameter("limit", {"type": "integer", "minimum": 1, "maximum": most, "default": default})


def json_response(tree: Tree, status: int = 200) -> Response:
    return Response(msgspec.json.encode(tree), status, media_type="application/json")
