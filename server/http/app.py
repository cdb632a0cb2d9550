"""Build the application and run it: the routes, the errors, and a server that drains.

`create_app` is the whole API as an ASGI application; `serve` runs it until a signal. This process has no torch.
"""

import asyncio
import gc
import os
import resource
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from types import FrameType

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.telemetry import TelemetryConfig
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from gpu.memory.plan import MemoryPlan
from server import logs
from server.api_error import ApiError, invalid, unavailable
from server.deployment import ConfigError, Deployment
from server.engine.head_start import ENGINE_COMMAND, HeadStart
from server.engine.start_events import Listening, OnStart
from server.engine.traces import Traces, TracesError, open_traces
from server.grammar.grammar_checks import end_checks
from server.http.client_connection import Connection, Limits, connection_type
from server.http.request_scope import RequestScope, error_response
from server.loading.model_registry import ModelRegistry
from server.planning.side_by_side import ONE_AT_A_TIME, Room
from server.routes.catalogue import add_routes, find_routes
from server.routes.documents.document_routes import count_documents
from server.service.cache_events import publish_events
from server.service.service import Service, build_service, require_tls
from server.stores.document_registry import RegistryError, RegistryFull

_NO_TELEMETRY: TelemetryConfig = {"tracing": False, "metrics": False, "logs": False, "auto_configure": False}
_POLL_S = 0.02
_LONGEST_PATH = 200  # characters that a message repeats
_MOST_DESCRIPTORS = 65_536
_OWN_DESCRIPTORS = 128  # for the engine's sockets, the log and libraries, and for refusing connections beyond the limit
_LAST_WORDS_S = 1.0  # for clients to read their last message once the drain is over
_LAST_SENDS_S = 3  # uvicorn's own limit, after ours
_SHUT_DOWN = "the server shut down before this request was done"


@dataclass(frozen=True, slots=True)
class OtherModels:
    """The models that are served beside the first one, with their plans, and the room for engines."""

    planned: tuple[tuple[Deployment, MemoryPlan], ...] = ()
    room: Room = ONE_AT_A_TIME


NO_OTHERS = OtherModels()


def create_app(
    deployment: Deployment,
    memory: MemoryPlan,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    on_start: OnStart | None = None,
    ahead: HeadStart | None = None,
    others: OtherModels = NO_OTHERS,
) -> FastAPI:
    """Make the API of a deployment. Its lifespan starts and ends the engine process.

    memory: the plan that the engine allocates.
    engine_command: run with two socket addresses and this process's id as arguments.
    on_start: called with the progress of the engine's first start, in place of the log.
    ahead: may have an engine process that was started in advance.
    others: models that are served beside this one, which is loaded first.

    `app.state.models` has all models, and `app.state.service` what routes share of the first. Raises ConfigError if the
    tokenizer, the chat template, the keys or the documents cannot be read, the addresses of events cannot be used, or
    traces cannot be exported.
    """
    service = build_service(deployment, memory, engine_command, on_start, ahead)
    beside = [build_service(*planned, engine_command, None, ahead, beside=service) for planned in others.planned]
    models = ModelRegistry([service, *beside], others.room, ahead)
    traces = _open_traces([service, *beside])
    events = publish_events([service, *beside])

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        models.start()
        for model in models.models:
            await count_documents(model.service)
        try:
            yield
        finally:
            service.texts.shutdown()
            end_checks()
            await models.stop()
            if events is not None:
                events.close()
            if traces is not None:
                traces.shutdown()
            for model in models.models:
                if model.service.documents is not None:
                    model.service.documents.registry.close()

    app = FastAPI(
        title="Tandem",
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        telemetry=_NO_TELEMETRY,
    )
    app.state.service, app.state.models = service, models
    add_routes(app, find_routes())
    app.add_middleware(RequestScope, service=service)
    if deployment.server.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=deployment.server.cors_origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RegistryFull, _on_registry_full)
    app.add_exception_handler(RegistryError, _on_registry_error)
    return app


def _open_traces(services: Sequence[Service]) -> Traces | None:
    """Open the export of traces of all models' calls; None: it is not configured. Raises ConfigError."""
    try:
        traces = open_traces(services[0].settings.tracing)
    except TracesError as error:
        raise ConfigError(str(error)) from None
    for service in services:
        service.traces = traces
    return traces


def serve(
    deployment: Deployment,
    memory: MemoryPlan,
    on_start: OnStart | None = None,
    engine_command: Sequence[str] = ENGINE_COMMAND,
    ahead: HeadStart | None = None,
    others: OtherModels = NO_OTHERS,
) -> str | None:
    """Serve until a signal. Returns None after a drain, or in one line why it could not start or go on.

    The first SIGTERM or SIGINT drains: new requests get a 503, open ones have `drain_seconds` to finish. The second
    one ends the program at once. Port 0 means any free port. on_start: called with the address and the stages of the
    first start; None: they are logged. engine_command, ahead, others: as for `create_app`.
    """
    settings = deployment.server
    logs.configure(settings.log_level)
    logs.debug(
        "configuration",
        deployment=deployment.model_dump_json(exclude={"server": {"api_keys", "api_keys_file", "admin_keys_file"}}),
    )
    logs.debug("memory", **describe_memory(memory))
    try:
        app = create_app(deployment, memory, engine_command, on_start, ahead, others)
        http = http_config(app)
        listener = _bind(settings.host, settings.port)
    except ConfigError as error:
        return str(error)
    program = _Program(http, app.state.models, on_start)
    gc.collect()
    gc.freeze()  # nothing that exists now becomes garbage, and streams pause during a full collection
    program.run(sockets=[listener])
    return program.failure


def describe_memory(plan: MemoryPlan) -> dict[str, object]:
    """Return a memory plan as fields of a log line: the bytes used in each place, pages, and the longest context."""
    used = {f"{place}_bytes": plan.used_bytes(place) for place in plan.limit_bytes}
    return {
        "device": plan.device,
        **used,
        "pages": plan.num_pages,
        "max_context_tokens": plan.max_context_tokens,
    }


def http_config(app: FastAPI) -> uvicorn.Config:
    """Return uvicorn's configuration for an application of `create_app`, with our limits and deadlines.

    Raises ConfigError if the certificate, its key or the clients' CA cannot be used.
    """
    settings = app.state.service.settings
    require_tls(settings)
    limits = Limits(
        allowed_connections(settings.max_connections),
        settings.header_seconds,
        settings.body_seconds,
        settings.stall_seconds,
    )
    config = uvicorn.Config(
        app,
        loop="uvloop",
        http=connection_type(limits),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=_LAST_SENDS_S,
        ssl_certfile=settings.tls_certificate,
        ssl_keyfile=settings.tls_key,
        ssl_ca_certs=None if settings.tls_client_ca is None else str(settings.tls_client_ca),
        ssl_cert_reqs=ssl.CERT_NONE if settings.tls_client_ca is None else ssl.CERT_REQUIRED,
    )
    config.load()
    return config


def allowed_connections(asked: int | None) -> int:
    """Return `server.max_connections`, but at most what descriptors allow; a lower number is logged."""
    most = most_connections()
    if asked is None or asked <= most:
        return asked or most
    logs.warning("max_connections_cut", asked=asked, allowed=most, raise_it_with="ulimit -n")
    return most


def most_connections() -> int:
    """Return how many connections descriptors allow, after raising the process's soft limit."""
    soft, hard = (_finite(limit) for limit in resource.getrlimit(resource.RLIMIT_NOFILE))
    if soft < min(hard, _MOST_DESCRIPTORS):
        soft = min(hard, _MOST_DESCRIPTORS)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    return max(1, min(soft, _MOST_DESCRIPTORS) - _OWN_DESCRIPTORS)


def _finite(limit: int) -> int:
    return _MOST_DESCRIPTORS if limit == resource.RLIM_INFINITY else limit


class _Program(uvicorn.Server):
    """A uvicorn server that drains on a signal, and ends when the engine's first start fails."""

    def __init__(self, config: uvicorn.Config, models: ModelRegistry, on_start: OnStart | None) -> None:
        super().__init__(config)
        self._on_start = on_start
        self.failure: str | None = None
        self._models = models
        self._service = models.first.service
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: list[asyncio.Task[None]] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._loop = asyncio.get_running_loop()
        self._tasks.append(self._loop.create_task(self._watch_engine()))
        host, port = (sockets or [])[0].getsockname()[:2]
        scheme = "https" if self.config.is_ssl else "http"
        url = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
        if self._on_start is None:
            logs.info("listening", url=url)
        else:
            self._on_start(_describe_address(url, self._service))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for task in self._tasks:
            task.cancel()
        self._end_connections()
        asyncio.get_running_loop().call_later(_LAST_WORDS_S, self._cut_connections)
        await super().shutdown(sockets)

    def _cut_connections(self) -> None:
        """Abort connections whose clients do not read their last message."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._service.draining or self._loop is None:
            self._models.kill_engines()
            os._exit(128 + sig)
        self._service.draining = True
        self._loop.call_soon_threadsafe(self._begin_drain)

    def _begin_drain(self) -> None:
        assert self._loop is not None
        self._tasks.append(self._loop.create_task(self._drain()))

    async def _drain(self) -> None:
        service = self._service
        logs.info("draining", open_requests=service.num_open, seconds=service.settings.drain_seconds)
        self._models.end_by(time.monotonic() + service.settings.drain_seconds)
        with suppress(TimeoutError):
            await asyncio.wait_for(self._all_closed(), service.settings.drain_seconds)
        if service.num_open:
            logs.warning("drain_expired", open_requests=service.num_open)
            self._models.abandon(_SHUT_DOWN, "draining")
            self._end_connections()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._all_closed(), _LAST_WORDS_S)
        self.should_exit = True

    def _end_connections(self) -> None:
        """Close idle connections, and refuse unfinished requests; answers that have begun continue."""
        for connection in list(self.server_state.connections):
            assert isinstance(connection, Connection)
            connection.end(unavailable(f"server: {_SHUT_DOWN}", "draining", self._service.settings.retry_after_seconds))

    async def _all_closed(self) -> None:
        while self._service.num_open:
            await asyncio.sleep(_POLL_S)

    async def _watch_engine(self) -> None:
        failure = self._models.failure
        assert failure is not None
        self.failure = await asyncio.shield(failure)
        self.should_exit = True


def _describe_address(url: str, service: Service) -> Listening:
    path = "/v1/completions" if service.template is None else "/v1/chat/completions"
    keys = bool(service.keys.digests)
    return Listening(url, path, service.model_name, needs_key=keys, has_page=service.settings.page)


def _bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises ConfigError."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)  # with TCP named as protocol, asyncio sets TCP_NODELAY
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
        listener.setblocking(False)
    except OSError as error:
        raise ConfigError(f"server: cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error, request.url.path)


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:_LONGEST_PATH]
    what = {
        404: f"{path}: no such route",
        405: f"{path}: {request.method} is not allowed here",
    }.get(error.status_code, str(error.detail))
    code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
    return error_response(ApiError(error.status_code, what, code=code, headers=dict(error.headers or {})), path)


async def _on_registry_full(request: Request, error: Exception) -> Response:
    return error_response(invalid("documents", str(error), "documents_full"), request.url.path)


async def _on_registry_error(request: Request, error: Exception) -> Response:
    logs.warning("documents_unavailable", reason=str(error))
    what = "documents: they cannot be read or written now; the server's log says why, under this x-request-id"
    retry_after_seconds = request.app.state.service.settings.retry_after_seconds
    return error_response(unavailable(what, "documents_unavailable", retry_after_seconds), request.url.path)
