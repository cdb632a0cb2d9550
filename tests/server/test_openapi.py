"""The API's own document, and a fuzzer that reads it: whatever is sent, no 5xx, and no answer that is not in it.

Of 3,000 cases the ordinary suite has a sample that is always the same.
"""

import signal
from collections import Counter
from collections.abc import Iterator

import httpx
import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.schemas import APIOperation
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from server import answers, routes_discovery, routes_docs, routes_generation, routes_status, routes_tokens
from server.bodies import RANGES, ChatBody, CompletionBody
from server.openapi import build_document
from tests.server.program import Program

CHECKS = [
    not_a_server_error,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
    negative_data_rejection,
]
KEY = "sk-fuzz"
POSTS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")
GETS = (
    "/v1/models", "/v1/models/{model_id}", "/tokenizer_info", "/server_info", "/v1/loads",
    "/health", "/live", "/version", "/metrics",
)  # fmt: skip


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Answers end early: a context of 256 tokens."""
    program = Program({"context": 256}, api_keys=[KEY])
    yield program.ready()
    program.process.send_signal(signal.SIGTERM)
    code, errors = program.end()
    assert code == 0
    assert "Traceback" not in errors


def fuzz_operation(url: str, operation: APIOperation, mode: GenerationMode, num: int, is_sample: bool) -> Counter[int]:
    """So many cases of one operation, each checked. Returns how often each status came."""
    statuses: Counter[int] = Counter()

    @settings(
        max_examples=num,
        deadline=None,
        database=None,
        derandomize=is_sample,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def check(case: schemathesis.Case) -> None:
        headers = {"authorization": f"Bearer {KEY}"}
        answer = case.call_and_validate(base_url=url, headers=headers, checks=CHECKS, timeout=60)
        statuses[answer.status_code] += 1

    check()
    return statuses


def fuzz(url: str, num_of_posts: int, num_of_gets: int, is_sample: bool) -> int:
    """Every operation, with bodies that its schema allows and ones that it does not. Returns the number of cases."""
    document = httpx.get(f"{url}/openapi.json").json()
    assert set(document["paths"]) == {*POSTS, *GETS}
    schema = schemathesis.openapi.from_dict(document)
    statuses = {path: Counter() for path in (*POSTS, *GETS)}
    for path in POSTS:
        for mode in GenerationMode:
            statuses[path] += fuzz_operation(url, schema[path]["POST"], mode, num_of_posts, is_sample)
    for path in GETS:
        statuses[path] += fuzz_operation(url, schema[path]["GET"], GenerationMode.POSITIVE, num_of_gets, is_sample)
    print(f"\n{statuses}")
    assert all(statuses[path][400] for path in POSTS)
    assert all(statuses[path][200] for path in (*POSTS, *GETS) if path != "/v1/models/{model_id}")
    return sum(counter.total() for counter in statuses.values())


def test_a_sample_of_whatever_is_sent_gets_an_answer_that_is_in_the_document(url):
    assert fuzz(url, 18, 2, is_sample=True) >= 150


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_3000_cases_of_whatever_is_sent_get_an_answer_that_is_in_the_document(url):
    assert fuzz(url, 370, 20, is_sample=False) >= 3000


@pytest.mark.parametrize(
    ("path", "chunk", "own"),
    [
        (POSTS[0], answers.CompletionChunk, {"prompt": "one two three", "logprobs": 2, "echo": True}),
        (
            POSTS[1],
            answers.ChatChunk,
            {"messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2},
        ),
    ],
)
def test_every_event_of_a_stream_is_in_the_document(url, path, chunk, own):
    body = own | {"stream": True, "return_progress": True, "stream_options": {"include_usage": True}, "n": 2}
    answer = httpx.post(f"{url}{path}", json=body, headers={"authorization": f"Bearer {KEY}"})
    *events, last = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert last == "[DONE]"
    chunks = [msgspec.json.decode(event, type=chunk) for event in events]
    assert chunks[-1].usage.completion_tokens > 0
    assert any(choice.logprobs for event in chunks for choice in event.choices)


def test_the_page_and_the_document_need_no_key_and_nothing_from_elsewhere(url):
    page = httpx.get(f"{url}/docs")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "POST /v1/chat/completions" in page.text
    assert "temperature" in page.text
    assert "http://" not in page.text.replace(url, "")
    assert "https://" not in page.text
    document = httpx.get(f"{url}/openapi.json").json()
    assert document["security"] == [{"key": []}]
    assert "security" not in build_document("a", ("exact",), has_keys=False)


def test_the_document_has_every_route_of_the_application_and_every_field_of_a_body():
    document = build_document("a", ("exact",), has_keys=False)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for routes in (routes_discovery, routes_docs, routes_generation, routes_status, routes_tokens)
        for route in routes.router.routes
        for method in getattr(route, "methods", ())
    }
    described = {(path, method) for path, methods in document["paths"].items() for method in methods}
    assert routes - described == {("/openapi.json", "get"), ("/docs", "get")}
    assert described <= routes
    for body in (CompletionBody, ChatBody):
        properties = document["components"]["schemas"][body.__name__]["properties"]
        assert set(properties) == set(body.__struct_fields__)
        for name in set(RANGES) & set(properties):
            assert "maximum" in properties[name]
