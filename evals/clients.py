"""Run samples against any OpenAI-compatible URL, as raw completions or as chat, many at a time.

A sample with `meta["raw"]` holds its own special tokens and goes to `/completions` as it is. As chat, the user's turn
is taken out of it, and an answer prefix at the prompt's end is dropped. The invariant: each sample comes back exactly
once, as a text or as a failure with its reason. No request is tried more than `max_retries + 1` times.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import httpx

from evals.samples import Sample
from evals.tasks.reference import user_turn

RETRIED_STATUS = {408, 409, 425, 429, 500, 502, 503, 504}
FIRST_WAIT_S = 0.5
LONGEST_WAIT_S = 20.0
PROBE_RETRIES = 2
ERROR_CHARACTERS = 300


@dataclass(frozen=True)
class Endpoint:
    """A server, and how it is asked.

    url: up to and with `/v1`. mode: `completions` or `chat`. extra: further body fields. timeout_s: the limit of one
    request, from sending to the last byte.
    """

    url: str
    model: str
    mode: str
    api_key: str | None
    concurrency: int
    max_retries: int
    timeout_s: float
    extra: dict[str, Any]

    def __post_init__(self) -> None:
        if self.mode not in ("completions", "chat"):
            raise ValueError(f"endpoint mode {self.mode!r}: wanted `completions` or `chat`")
        if self.concurrency < 1 or self.max_retries < 0:
            raise ValueError(
                f"endpoint: concurrency is {self.concurrency} and max_retries {self.max_retries}; wanted 1 and 0 or "
                "more"
            )


@dataclass(frozen=True)
class Reply:
    """The result of a sample: its text; or an empty text with `failure`, the reason after all retries."""

    sample: Sample
    text: str
    failure: str | None
    num_tries: int


class Refused(Exception):
    """A reply without an answer. retry: whether asking again can help."""

    def __init__(self, reason: str, retry: bool) -> None:
        super().__init__(reason)
        self.retry = retry


def request_body(endpoint: Endpoint, sample: Sample) -> dict[str, Any]:
    """Return the JSON body for a sample: greedy, at most its max_new_tokens."""
    body: dict[str, Any] = {"model": endpoint.model, "temperature": 0.0, "max_tokens": sample.max_new_tokens}
    if sample.meta.get("stop"):
        body["stop"] = sample.meta["stop"]
    if endpoint.mode == "chat":
        turn = user_turn(sample.prompt) if sample.meta.get("raw") else sample.prompt
        content = turn.removesuffix(sample.meta.get("answer_prefix", ""))
        return body | {"messages": [{"role": "user", "content": content}]} | endpoint.extra
    return body | {"prompt": sample.prompt} | endpoint.extra


def text_of(endpoint: Endpoint, payload: Any) -> str:
    """Return the answer's text in a response. Raises Refused where there is none."""
    try:
        first = payload["choices"][0]
        text = first["message"]["content"] if endpoint.mode == "chat" else first["text"]
    except (KeyError, IndexError, TypeError) as error:
        raise Refused(f"response without choices: {str(payload)[:ERROR_CHARACTERS]}", retry=False) from error
    return text or ""


async def ask_once(client: httpx.AsyncClient, endpoint: Endpoint, sample: Sample) -> str:
    """Send one request. Raises Refused if no answer comes."""
    path = path_of(endpoint)
    try:
        async with asyncio.timeout(endpoint.timeout_s):
            response = await client.post(endpoint.url.rstrip("/") + path, json=request_body(endpoint, sample))
    except TimeoutError as error:
        raise Refused(f"no answer in {endpoint.timeout_s} s", retry=True) from error
    except httpx.TransportError as error:
        raise Refused(f"{type(error).__name__}: {error}", retry=True) from error
    if response.status_code != httpx.codes.OK:
        reason = f"status {response.status_code}: {response.text[:ERROR_CHARACTERS]}"
        raise Refused(reason, retry=response.status_code in RETRIED_STATUS)
    try:
        payload = response.json()
    except ValueError as error:
        raise Refused(f"response is not JSON: {response.text[:ERROR_CHARACTERS]}", retry=False) from error
    return text_of(endpoint, payload)


async def ask(client: httpx.AsyncClient, endpoint: Endpoint, sample: Sample) -> Reply:
    """Return the reply to a sample. Retries up to `max_retries` times, and doubles the wait between tries."""
    wait_s = FIRST_WAIT_S
    for num_tries in range(1, endpoint.max_retries + 2):
        try:
            return Reply(sample, await ask_once(client, endpoint, sample), None, num_tries)
        except Refused as refused:
            if not refused.retry or num_tries > endpoint.max_retries:
                return Reply(sample, "", str(refused), num_tries)
        await asyncio.sleep(wait_s)
        wait_s = min(2 * wait_s, LONGEST_WAIT_S)
    raise AssertionError("the loop returns at its last try")


class ProbeError(ValueError):
    """A server that does not answer as it should; raised before any sample is sent."""


async def probe(endpoint: Endpoint, transport: httpx.AsyncBaseTransport | None) -> None:
    """Ask for one token, in the way samples are asked for.

    Raises ProbeError, which names the request, the reply and what was wanted.
    """
    sample = Sample("probe", "probe", "The", [], "exact", 1, 0, None)
    asked = replace(endpoint, max_retries=min(endpoint.max_retries, PROBE_RETRIES))
    async for reply in ask_all(asked, [sample], transport):
        if reply.failure is not None:
            path = path_of(endpoint)
            extra = f" with {json.dumps(endpoint.extra)}" if endpoint.extra else ""
            raise ProbeError(
                f"--url {endpoint.url}: POST {path} for one token of model {endpoint.model!r}{extra}: {reply.failure}; "
                "wanted status 200 and an answer; check that the server runs, the URL up to and with /v1, "
                "--served-model and the profile"
            )


def path_of(endpoint: Endpoint) -> str:
    """Return the path of the endpoint's requests, below the URL."""
    return "/chat/completions" if endpoint.mode == "chat" else "/completions"


async def ask_all(
    endpoint: Endpoint, samples: Sequence[Sample], transport: httpx.AsyncBaseTransport | None
) -> AsyncIterator[Reply]:
    """Yield replies as they come, in any order. At most `endpoint.concurrency` requests are under way.

    transport: None for the network.
    """
    headers = {"Authorization": f"Bearer {endpoint.api_key}"} if endpoint.api_key else {}
    limits = httpx.Limits(max_connections=endpoint.concurrency)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=None, transport=transport) as client:
        slots = asyncio.Semaphore(endpoint.concurrency)

        async def answer(sample: Sample) -> Reply:
            async with slots:
                return await ask(client, endpoint, sample)

        tasks = [asyncio.create_task(answer(sample)) for sample in samples]
        try:
            for finished in asyncio.as_completed(tasks):
                yield await finished
        finally:
            for task in tasks:
                task.cancel()
