"""Export traces of calls with OpenTelemetry, whose library comes with the extra `otel`.

Names follow the semantic conventions for generative AI (`gen_ai.*`), which are not stable yet; our own begin with
`tandem.`. A call is one span, a child of the caller's span if the request has a `traceparent`. Its children are the
stages of each sequence: `queue`, `prefill`, `decode`. Spans are made once the call has ended, and a thread of the
library exports them; if it falls behind, it drops some.
"""

import os
import threading
import time
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from server.observing_config import TracingConfig
from server.release import release

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_PARENT, _STATE = "traceparent", "tracestate"
_LONGEST_STATE = 512  # characters, as W3C Trace Context asks for at least
_TRACES_PATH = "/v1/traces"  # of OTLP over HTTP
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_SHUTDOWN_SECONDS = 5.0  # for the last spans to be exported


@dataclass(slots=True)
class Origin:
    """The origin of the current request: headers that name its parent span, and its arrival in `time.monotonic()`
    seconds; None once a call has used it.
    """

    carrier: Mapping[str, str] = field(default_factory=dict)
    arrival_s: float | None = None

    def begin(self, now: float) -> float:
        """Return when a call began: for a request's first call when the request arrived, for others now."""
        begin_s, self.arrival_s = self.arrival_s, None
        return now if begin_s is None else begin_s


origin: ContextVar[Origin | None] = ContextVar("origin", default=None)

AttributeValue = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, AttributeValue]


class TracesError(Exception):
    """Configured traces cannot be exported; the message is one line."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A part of a call: from one time to another, `time.monotonic()` seconds."""

    name: str
    begin_s: float
    end_s: float
    attributes: Attributes = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CallSpan:
    """A call that has ended. error: why it failed; "": it did not."""

    whole: Stage
    stages: Sequence[Stage]
    error: str
    carrier: Mapping[str, str]


class Traces:
    """Makes the spans of calls, which a provider exports."""

    def __init__(self, provider: "TracerProvider") -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("tandem", release())

    def record(self, call: CallSpan) -> None:
        """Make the spans of a call that has ended."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        now_ns = time.time_ns() - time.monotonic_ns()

        def ns(seconds: float) -> int:
            return now_ns + int(1e9 * seconds)

        whole = call.whole
        parent = TraceContextTextMapPropagator().extract(call.carrier)
        span = self._tracer.start_span(
            whole.name, parent, SpanKind.SERVER, whole.attributes, start_time=ns(whole.begin_s)
        )
        inside = set_span_in_context(span)
        for stage in call.stages if span.is_recording() else ():
            part = self._tracer.start_span(
                stage.name, inside, attributes=stage.attributes, start_time=ns(stage.begin_s)
            )
            part.end(ns(stage.end_s))
        if call.error:
            span.set_attribute("error.type", call.error)
            span.set_status(Status(StatusCode.ERROR))
        span.end(ns(whole.end_s))

    def shutdown(self) -> None:
        """Export what is left, for a few seconds at most."""
        last = threading.Thread(target=self._provider.shutdown, daemon=True)
        last.start()
        last.join(_SHUTDOWN_SECONDS)


def open_traces(config: TracingConfig | None, environment: Mapping[str, str] = os.environ) -> Traces | None:
    """Open the export of traces, if the section or the variable OTEL_EXPORTER_OTLP_ENDPOINT turns it on.

    Returns None if not, or if a variable turns traces off. Raises TracesError.
    """
    asked = "server.tracing" if config is not None else _asking_variable(environment)
    if asked is None or environment.get("OTEL_SDK_DISABLED", "").lower() == "true":
        return None
    exporter = environment.get("OTEL_TRACES_EXPORTER", "otlp")
    if exporter == "none":
        return None
    if exporter != "otlp":
        raise TracesError(f"{asked}: OTEL_TRACES_EXPORTER is {exporter!r}; wanted otlp or none")
    protocol = next((environment[name] for name in _PROTOCOLS if name in environment), "http/protobuf")
    if protocol != "http/protobuf":
        raise TracesError(f"{asked}: OTEL_EXPORTER_OTLP_PROTOCOL is {protocol!r}; wanted http/protobuf")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        known: dict[str, Any] = {} if "OTEL_SERVICE_NAME" in environment else {"service.name": "tandem"}
        resource = Resource.create(known | {"service.version": release()})
        provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(_address(config))))
    except ImportError as error:
        off = "or leave the section out" if config is not None else "or set OTEL_TRACES_EXPORTER=none"
        raise TracesError(f"{asked}: traces need the extra otel ({error}); pip install '.[otel]', {off}") from None
    except ValueError as error:  # of one of the library's variables
        told = " ".join(str(error).split())
        raise TracesError(f"{asked}: a variable OTEL_* cannot be used: {told}") from None
    return Traces(provider)


def read_carrier(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that name the request's parent span. A too long `tracestate` is left out, as W3C Trace Context
    allows.
    """
    found = {name: headers[name] for name in (_PARENT, _STATE) if name in headers}
    if len(found.get(_STATE, "")) > _LONGEST_STATE:
        del found[_STATE]
    return found


def _asking_variable(environment: Mapping[str, str]) -> str | None:
    if environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp":  # another exporter's, which is not meant for us
        return None
    return next((name for name in _ENDPOINTS if environment.get(name)), None)


def _address(config: TracingConfig | None) -> str | None:
    """Return the address for spans; None: from the library's own variables, or its default."""
    if config is None or config.endpoint is None:
        return None
    has_path = urlsplit(config.endpoint).path not in ("", "/")
    return config.endpoint if has_path else config.endpoint.rstrip("/") + _TRACES_PATH
