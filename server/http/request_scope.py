"""Handle what all HTTP requests share: request ids, other sites' pages, keys, the drain, log lines, and unexpected
errors.

Open routes (`Route.is_open`) need no key, and answer during a drain, when all others answer 503.
"""

import re
import time
import uuid

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server import logs
from server.api_error import ApiError, bad_key, internal, unavailable
from server.engine.traces import Origin, origin, read_carrier
from server.http.foreign_requests import ForeignRequests
from server.routes.catalogue import find_routes
from server.service.service import Keys, Service

OPEN_PATHS = frozenset(route.path for route in find_routes() if route.is_open)

MESSAGES_PATH = "/v1/messages"  # and what is below it: whose clients send `x-api-key`
OLLAMA_PATH = "/api/"

IGNORED_HEADER = "x-tandem-ignored"
_LONGEST_HEADER = 1024  # characters
_MOST_LOGGED = 1000

_SANE_ID = re.compile(r"[A-Za-z0-9._:@/+=-]{1,128}")


class RequestScope:
    """ASGI middleware around the application; only Starlette's own is further outside."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._foreign = ForeignRequests(service.settings, bool(service.keys.digests))
        self._logged: set[tuple[str, str]] = set()  # routes and their fields

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        request_id = headers.get("x-request-id", "")
        if not _SANE_ID.fullmatch(request_id):
            request_id = uuid.uuid4().hex
        scope["request_id"] = request_id  # for the connection's own log lines
        token = logs.request_id.set(request_id)
        # HEAD is GET without its body, which the HTTP server leaves out.
        inner = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        began_s = time.monotonic()
        if self._service.traces is not None:
            origin.set(Origin(read_carrier(headers), began_s))
        status = 0
        ignored: list[str] = []  # filled while the body is read

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                sent = MutableHeaders(scope=message)
                sent["x-request-id"] = request_id
                if ignored:
                    sent[IGNORED_HEADER] = self._tell_ignored(scope["path"], ignored)
            await send(message)

        counted = scope["path"] not in OPEN_PATHS
        self._service.num_open += counted
        try:
            self._foreign.check(headers)
            inner.setdefault("state", {}).update(self._admit(scope["path"], headers), ignored=ignored)
            await self._app(inner, receive, send_with_id)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        except ClientDisconnect:
            status = 499
        except Exception:
            logs.exception("internal_error", path=scope["path"])
            if status == 0:
                unknown = internal("internal error; the server's log has the details under this x-request-id")
                await error_response(unknown, scope["path"])(scope, receive, send_with_id)
        finally:
            if (lease := inner.get("state", {}).get("lease")) is not None:
                lease.release()
            self._service.num_open -= counted
            milliseconds = 1e3 * (time.monotonic() - began_s)
            level = logs.info if counted else logs.debug
            level("http", method=scope["method"], path=scope["path"], status=status, ms=milliseconds)
            logs.request_id.reset(token)

    def _tell_ignored(self, path: str, ignored: list[str]) -> str:
        """Return the header that names ignored fields, and log each field of a route the first time that it occurs."""
        for field in ignored:
            known = (path, re.sub(r"\[\d+\]", "[]", field))
            if known not in self._logged and len(self._logged) < _MOST_LOGGED:
                self._logged.add(known)
                logs.info("ignored_field", path=path, field=known[1])
        names = (ascii(field)[1:-1] for field in ignored)
        return ", ".join(names)[:_LONGEST_HEADER]

    def _admit(self, path: str, headers: Headers) -> dict[str, str | bool]:
        """Check the key and the drain, and return the key's cache salt, owner name and whether it is an
        administrator's.

        Raises ApiError 401 or 503.
        """
        service = self._service
        known: dict[str, str | bool] = {"cache_salt": "", "document_owner": "", "is_administrator": False}
        if path in OPEN_PATHS:
            return known
        if service.keys.digests:
            scheme, _, key = headers.get("authorization", "").partition(" ")
            if "authorization" not in headers and path.startswith(MESSAGES_PATH):
                scheme, key = "bearer", headers.get("x-api-key", "")
            if scheme.lower() != "bearer" or not key.strip():
                raise bad_key("authorization: no key; send 'Authorization: Bearer KEY'")
            if not service.keys.knows(key.strip()):
                raise bad_key("authorization: this key is not known here")
            known |= {"cache_salt": service.cache_salt(key.strip()), "document_owner": Keys.owner_of(key.strip())}
        else:
            key = ""
        known["is_administrator"] = service.keys.is_administrator(key.strip())
        if service.draining:
            raise unavailable("server: shutting down", "draining", service.settings.retry_after_seconds)
        return known


def error_response(error: ApiError, path: str) -> Response:
    """Return the error in the format of the route's API: Anthropic's, Ollama's or OpenAI's."""
    if path.startswith(OLLAMA_PATH):
        body = error.ollama_body()
    else:
        body = error.messages_body() if path.startswith(MESSAGES_PATH) else error.body()
    return Response(body, error.status, error.headers, "application/json")
