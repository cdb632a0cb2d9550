"""Spans of calls: a collector gets those of a server, behind the caller's, with the stages of each sequence inside."""

import asyncio
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from server.deployment import ConfigError
from server.engine.traces import Traces, TracesError, open_traces, read_carrier
from server.generation.call_trace import CallTrace
from server.observing_config import TracingConfig
from server.routes import generate
from tests.server.live_server import Running, fake_command, make_app, make_deployment, running_server

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "asked-by-a-test"}
CHAT = "/v1/chat/completions"
HI = [{"role": "user", "content": "one two three four five six seven"}]


class Collector(ThreadingHTTPServer):
    """Takes spans by OTLP over HTTP."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.asked: list[tuple[str, ExportTraceServiceRequest]] = []
        threading.Thread(target=self.serve_forever, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def spans(self) -> list[Any]:
        return [
            span for _, one in self.asked for resource in one.resource_spans
            for scope in resource.scope_spans for span in scope.spans
        ]  # fmt: skip


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append((self.path, request))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.fixture
def exporter(live: Running) -> InMemorySpanExporter:
    """Have the server's spans made at once, in this process."""
    kept, provider = InMemorySpanExporter(), TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    live.service.traces = Traces(provider)
    return kept


async def spans_of(live: Running, exporter: InMemorySpanExporter, path: str, **body: Any) -> dict[str, ReadableSpan]:
    """Return the spans of one call by name; the call's own comes last, maybe behind its answer."""
    exporter.clear()
    await live.http.post(path, json=body, headers=HEADERS)
    async with asyncio.timeout(10):
        while not any(span.name.endswith(" reference") for span in exporter.get_finished_spans()):
            await asyncio.sleep(0.01)
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_collector_gets_the_spans_of_a_call_behind_its_callers() -> None:
    collector = Collector()
    try:
        async with running_server(make_deployment(tracing={"endpoint": collector.url}), fake_command()) as live:
            before = time.time_ns()
            answer = await live.http.post(CHAT, json={"messages": HI, "max_tokens": 5}, headers=HEADERS)
            assert answer.status_code == 200
            after = time.time_ns()
        assert [path for path, _ in collector.asked] == ["/v1/traces"], "those of the last seconds come with the end"
        resource = collector.asked[0][1].resource_spans[0].resource
        assert {one.key: one.value.string_value for one in resource.attributes}["service.name"] == "tandem"
        spans = {span.name: span for span in collector.spans()}
        assert spans.keys() == {"chat reference", "queue", "prefill", "decode"}
        whole = spans["chat reference"]
        assert (whole.trace_id.hex(), whole.parent_span_id.hex()) == (TRACE, PARENT)
        for name in ("queue", "prefill", "decode"):
            assert (spans[name].trace_id.hex(), spans[name].parent_span_id) == (TRACE, whole.span_id)
        times = [whole.start_time_unix_nano]
        for name in ("queue", "prefill", "decode"):
            times += [spans[name].start_time_unix_nano, spans[name].end_time_unix_nano]
        times.append(whole.end_time_unix_nano)
        assert times == sorted(times)
        assert before <= times[0] <= times[-1] <= after + 1e9
    finally:
        collector.shutdown()
        collector.server_close()


async def test_a_span_says_what_was_asked_and_what_was_answered(live: Running, exporter: InMemorySpanExporter) -> None:
    body = {"messages": HI, "max_tokens": 5, "temperature": 0, "top_p": 0.5, "seed": 7, "session_id": "s1"}
    spans = await spans_of(live, exporter, CHAT, **body)
    whole = dict(spans["chat reference"].attributes)
    assert whole.pop("gen_ai.response.id").startswith("chatcmpl-")
    num_prompt = whole.pop("gen_ai.usage.input_tokens")
    assert whole == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tandem",
        "gen_ai.request.model": "reference",
        "gen_ai.response.model": "reference",
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.output_tokens": 5,
        "gen_ai.usage.cache_read.input_tokens": 7,
        "gen_ai.request.max_tokens": 5,
        "gen_ai.request.temperature": 0,
        "gen_ai.request.top_p": 0.5,
        "gen_ai.request.seed": 7,
        "gen_ai.conversation.id": "s1",
        "tandem.attention_profile": "exact",
        "tandem.request_id": "asked-by-a-test",
    }
    assert dict(spans["prefill"].attributes) == {
        "gen_ai.usage.input_tokens": num_prompt, "gen_ai.usage.cache_read.input_tokens": 7,
    }  # fmt: skip
    assert dict(spans["decode"].attributes) == {"gen_ai.usage.output_tokens": 5}
    assert spans["chat reference"].status.is_unset


async def test_each_sequence_of_a_call_has_its_stages(live: Running, exporter: InMemorySpanExporter) -> None:
    await spans_of(live, exporter, "/v1/completions", prompt="a b c", n=3, max_tokens=4)
    spans = exporter.get_finished_spans()
    assert sorted(span.name for span in spans) == ["decode"] * 3 + ["prefill"] * 3 + ["queue"] * 3 + [
        "text_completion reference"
    ]
    assert sorted(span.attributes["tandem.choice"] for span in spans if span.name == "decode") == [0, 1, 2]
    whole = next(span for span in spans if span.name.startswith("text"))
    assert (whole.attributes["gen_ai.request.choice.count"], whole.attributes["gen_ai.usage.output_tokens"]) == (3, 12)


async def test_a_stream_and_a_vector_have_spans_too(live: Running, exporter: InMemorySpanExporter) -> None:
    spans = await spans_of(live, exporter, CHAT, messages=HI, max_tokens=3, stream=True)
    assert spans.keys() == {"chat reference", "queue", "prefill", "decode"}
    spans = await spans_of(live, exporter, "/v1/embeddings", input="a b c")
    assert spans.keys() == {"embeddings reference", "queue", "prefill"}
    assert "gen_ai.request.max_tokens" not in spans["embeddings reference"].attributes


async def test_a_call_is_answered_whatever_happens_to_its_trace(
    live: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_PROPAGATORS", "tracecontext,baggage,no_such")
    monkeypatch.delitem(sys.modules, "opentelemetry.propagate", raising=False)
    spans = await spans_of(live, exporter, CHAT, messages=HI, max_tokens=3)
    assert f"{spans['chat reference'].context.trace_id:032x}" == TRACE

    def fail(*_: object) -> None:
        raise ValueError("a fault of a library")

    monkeypatch.setattr(live.service.traces, "record", fail)
    for stream in (False, True):
        answer = await live.http.post(CHAT, json={"messages": HI, "max_tokens": 3, "stream": stream})
        assert (answer.status_code, "error" in answer.text) == (200, False)
    assert (await live.http.post("/v1/embeddings", json={"input": "a b c"})).status_code == 200
    assert caplog.text.count("trace_failed") == 3


def test_of_a_requests_headers_only_those_of_w3c_are_read_and_none_that_are_too_long() -> None:
    headers = {"traceparent": "p", "tracestate": "a=1", "baggage": "a=1" + 8000 * " " + "b", "x": "y"}
    assert read_carrier(headers) == {"traceparent": "p", "tracestate": "a=1"}
    assert read_carrier(headers | {"tracestate": "a=1," + 8000 * " " + "b"}) == {"traceparent": "p"}


async def test_a_span_begins_when_its_request_arrives(
    live: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = generate.choose_limit

    def think(*given: Any) -> float | None:
        time.sleep(0.3)  # as a long prompt's tokenisation does, or a model's load
        return checked(*given)

    monkeypatch.setattr(generate, "choose_limit", think)
    spans = await spans_of(live, exporter, CHAT, messages=HI, max_tokens=3)
    assert spans["queue"].start_time - spans["chat reference"].start_time >= 0.3e9


@pytest.mark.parametrize("stages", [{"queue", "prefill"}, {"queue"}])
async def test_a_call_that_ends_before_its_first_token_has_the_stages_that_it_reached(
    stages: set[str], live: Running, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "prefill" not in stages:  # no progress of it is told
        monkeypatch.setattr(CallTrace, "observe_progress", lambda *_: None)
    asked = {"max_tokens": 9, "attention_profile": "long_prefill", "max_seconds": 0.3}
    spans = await spans_of(live, exporter, CHAT, messages=HI, **asked)
    assert spans.keys() == {"chat reference"} | stages
    assert spans["chat reference"].attributes["error.type"] == "time_limit"
    last = spans["prefill" if "prefill" in stages else "queue"]
    assert last.end_time == spans["chat reference"].end_time


FAILURES = [("breaks", "engine_error"), ("dies", "engine_dead"), ("too_large", "context_length_exceeded")]


@pytest.mark.parametrize(("profile", "error"), FAILURES)
async def test_a_call_that_fails_says_with_what(
    profile: str, error: str, live: Running, exporter: InMemorySpanExporter
) -> None:
    spans = await spans_of(live, exporter, CHAT, messages=HI, max_tokens=9, attention_profile=profile)
    whole = spans["chat reference"]
    assert whole.attributes["error.type"] == error
    assert not whole.status.is_ok
    assert not whole.status.is_unset
    if profile != "dies":  # what an engine said last may be lost with it
        assert ("prefill" in spans) == (profile == "breaks")
    await live.until_ready()


async def test_a_caller_who_does_not_sample_has_no_spans(live: Running, exporter: InMemorySpanExporter) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
    assert (await live.http.post(CHAT, json={"messages": HI, "max_tokens": 3}, headers=headers)).status_code == 200
    await spans_of(live, exporter, CHAT, messages=HI, max_tokens=3)
    assert len(exporter.get_finished_spans()) == 4, "of the second call alone"


@contextmanager
def without_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
        yield


def test_traces_that_cannot_be_exported_are_refused_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    with without_library(monkeypatch):
        assert open_traces(None, {}) is None
        with pytest.raises(
            ConfigError, match=r"server.tracing: traces need the extra otel .*pip install '.\[otel\]', or leave the"
        ):
            make_app(make_deployment(tracing={}), fake_command())
        wanted = r"OTEL_EXPORTER_OTLP_ENDPOINT: traces need the extra otel .* or set OTEL_TRACES_EXPORTER=none"
        with pytest.raises(TracesError, match=wanted):
            open_traces(None, {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4318"})
    with pytest.raises(TracesError, match="OTEL_EXPORTER_OTLP_PROTOCOL is 'grpc'; wanted http/protobuf"):
        open_traces(TracingConfig(), {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    with pytest.raises(ValueError, match="wanted http://HOST:PORT"):
        make_deployment(tracing={"endpoint": "collector:4318"})


def test_the_librarys_variables_ask_for_traces_and_turn_them_off() -> None:
    asked = {"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://127.0.0.1:9/v1/traces"}
    traces = open_traces(None, asked)
    assert traces is not None
    began = time.monotonic()
    traces.shutdown()
    assert time.monotonic() - began < 10
    for section in (None, TracingConfig()):
        assert open_traces(section, asked | {"OTEL_TRACES_EXPORTER": "none"}) is None
        assert open_traces(section, asked | {"OTEL_SDK_DISABLED": "true"}) is None
    assert open_traces(None, asked | {"OTEL_TRACES_EXPORTER": "console"}) is None
    with pytest.raises(TracesError, match=r"server.tracing: OTEL_TRACES_EXPORTER is 'console'; wanted otlp or none"):
        open_traces(TracingConfig(), {"OTEL_TRACES_EXPORTER": "console"})


def test_a_variable_of_the_library_that_it_refuses_is_told_in_a_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "100")  # fewer than are exported at once
    with pytest.raises(TracesError, match=r"^server.tracing: a variable OTEL_\* cannot be used: ."):
        open_traces(TracingConfig(), {})
