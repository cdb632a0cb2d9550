"""Send one request over HTTP, read its stream, and fill its record.

It uses aiohttp, because a chunk costs it 14 to 33 us of CPU, and httpx 52 to 58 us (64 streams of 47 chunks/s, parsing
included; 9 us against 19 us when chunks come in bursts). The whole client with its live display took 19 us a chunk at
2,800 chunks/s: 5 % of a core. Invariant: `send` never raises for a server's fault, but writes it to the record.
"""

import asyncio
import contextlib
import time
from typing import Any

import aiohttp
import msgspec

from bench.load.records import RequestRecord

_MAX_REASON = 160
_CLOSE_S = 1.0
"""Time to wait for a stream's last bytes after [DONE]: only a stream read to its end leaves its connection open."""


class _Details(msgspec.Struct):
    cached_tokens: int | None = None
    reused_tokens: int | None = None
    recomputed_tokens: int | None = None


class _AnswerDetails(msgspec.Struct):
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _Details | None = None
    completion_tokens_details: _AnswerDetails | None = None


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: Any = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


class StreamFault(Exception):
    """A stream that ended wrongly. The message is the reason in the report."""


class Client:
    """A session with one server. `now` returns seconds on the run's clock."""

    def __init__(self, base_url: str, api_key: str | None, timeout_s: float, retries: int) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.base_url = base_url
        self.timeout_s = timeout_s
        self.retries = retries
        self.start = time.perf_counter()
        self.session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None),
            json_serialize=lambda tree: msgspec.json.encode(tree).decode(),
        )

    def now(self) -> float:
        return time.perf_counter() - self.start

    async def send(self, path: str, body: dict[str, Any], record: RequestRecord) -> None:
        """Send a request and read its stream into `record`. A 429 is retried up to `retries` times, after its
        Retry-After.
        """
        record.sent_s = self.now()
        try:
            async with asyncio.timeout(self.timeout_s):
                while (pause_s := await self._send_once(path, body, record)) is not None:
                    record.retries += 1
                    await asyncio.sleep(pause_s)
            record.outcome = "completed"
        except TimeoutError:
            _fail(record, f"timeout after {self.timeout_s:g} s")
        except StreamFault as fault:
            _fail(record, str(fault))
        except aiohttp.ClientConnectorError as error:
            _fail(record, f"cannot connect: {error.strerror or error}")
        except (aiohttp.ClientError, OSError) as error:
            where = "mid-stream" if record.chunk_times_s else "before any output"
            _fail(record, f"disconnected {where}: {type(error).__name__}")
        except asyncio.CancelledError:
            record.outcome, record.reason = "unfinished", "interrupted"
            raise
        finally:
            record.end_s = record.end_s or self.now()
            if record.output_source == "chunks":
                record.output_tokens = len(record.chunk_times_s)

    async def _send_once(self, path: str, body: dict[str, Any], record: RequestRecord) -> float | None:
        """Send once. Returns None after the answer was read, or the seconds to wait before a retry."""
        async with self.session.post(self.base_url + path, json=body) as response:
            record.status = response.status
            if response.status == 429:
                record.num_429 += 1
                if record.retries < self.retries:
                    return _read_pause(response.headers.get("Retry-After"))
            if response.status != 200:
                raise StreamFault(f"HTTP {response.status}: {_describe_error(await response.text(errors='replace'))}")
            if "text/event-stream" not in response.content_type:
                raise StreamFault(f"answered {response.content_type}, wanted text/event-stream")
            await self._read_stream(response, record)
            record.end_s = self.now()
            with contextlib.suppress(TimeoutError, aiohttp.ClientError):
                await asyncio.wait_for(response.content.read(), _CLOSE_S)
        return None

    async def _read_stream(self, response: aiohttp.ClientResponse, record: RequestRecord) -> None:
        rest = b""
        async for data in response.content.iter_any():
            arrived_s = self.now()
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    event = line[5:].strip()
                    if event == b"[DONE]":
                        if record.finish_reason is None and not record.chunk_times_s:
                            raise StreamFault("stream held nothing but [DONE]")
                        return
                    _read_event(event, arrived_s, record)
        if record.finish_reason is None:
            raise StreamFault("stream ended without a finish_reason or [DONE]")

    async def find_model(self) -> str:
        """Return the first model of /v1/models. Raises StreamFault."""
        tree = await self._get_json("/v1/models")
        try:
            return str(tree["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise StreamFault(f"{self.base_url}/v1/models lists no model; name one with --model") from None

    async def count_tokens(self, model: str, text: str, with_special: bool) -> int:
        """Return the server's count of a text's tokens, from its /tokenize route.

        with_special: include the special tokens before a prompt. Raises StreamFault if it has no such route.
        """
        body = {"model": model, "prompt": text, "add_special_tokens": with_special}
        try:
            async with self.session.post(self.base_url + "/tokenize", json=body) as response:
                if response.status != 200:
                    raise StreamFault(f"/tokenize answered HTTP {response.status}")
                tree = await response.json(content_type=None)
                return int(tree["count"]) if "count" in tree else len(tree["tokens"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise StreamFault(f"/tokenize: {type(error).__name__}") from None

    async def add_document(self, title: str, text: str) -> str:
        """Send a document, and return its id after its chunks are stored. Raises StreamFault."""
        url = self.base_url + "/v1/documents"
        try:
            async with self.session.post(url, json={"title": title, "text": text}) as response:
                if response.status != 200:
                    raise StreamFault(f"{url}: HTTP {response.status}: {_describe_error(await response.text())}")
                return str((await response.json(content_type=None))["id"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError) as error:
            raise StreamFault(f"{url}: {error or type(error).__name__}") from None

    async def delete_document(self, document_id: str) -> None:
        """Delete a document. A failure is ignored, since a remaining document does no harm."""
        with contextlib.suppress(aiohttp.ClientError, OSError):
            (await self.session.delete(f"{self.base_url}/v1/documents/{document_id}")).release()

    async def _get_json(self, path: str) -> Any:
        try:
            async with asyncio.timeout(self.timeout_s), self.session.get(self.base_url + path) as response:
                if response.status != 200:
                    why = _describe_error(await response.text(errors="replace"))
                    raise StreamFault(f"{self.base_url}{path}: HTTP {response.status}: {why}")
                return await response.json(content_type=None)
        except (aiohttp.ClientError, OSError, ValueError, TimeoutError) as error:
            raise StreamFault(f"{self.base_url}{path}: {error or type(error).__name__}; is the server up?") from None


def _read_event(event: bytes, arrived_s: float, record: RequestRecord) -> None:
    try:
        chunk = _decode(event)
    except msgspec.DecodeError as error:
        raise StreamFault(f"malformed chunk: {str(error)[:80]}") from None
    if chunk.error is not None:
        raise StreamFault(f"error in the stream: {_describe_error(event.decode(errors='replace'))}")
    for choice in chunk.choices:
        delta = choice.delta
        text = choice.text if delta is None else delta.content
        if text or (delta and (delta.reasoning_content or delta.reasoning or delta.tool_calls)):
            record.chunk_times_s.append(arrived_s)
            if text:
                record.text.append(text)
        if choice.finish_reason is not None:
            record.finish_reason = choice.finish_reason
    if chunk.usage is not None:
        _read_usage(chunk.usage, record)


def _read_usage(usage: _Usage, record: RequestRecord) -> None:
    record.prompt_tokens = usage.prompt_tokens
    if usage.completion_tokens is not None:
        record.output_tokens, record.output_source = usage.completion_tokens, "usage"
    if usage.prompt_tokens_details is not None:
        record.cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.reused_tokens = usage.prompt_tokens_details.reused_tokens
        record.recomputed_tokens = usage.prompt_tokens_details.recomputed_tokens
    if usage.completion_tokens_details is not None:
        record.accepted_tokens = usage.completion_tokens_details.accepted_prediction_tokens
        record.rejected_tokens = usage.completion_tokens_details.rejected_prediction_tokens


def _fail(record: RequestRecord, reason: str) -> None:
    record.outcome, record.reason = "failed", reason[:_MAX_REASON]


def _read_pause(header: str | None) -> float:
    try:
        return max(0.0, float(header or 1.0))
    except ValueError:
        return 1.0


def _describe_error(text: str) -> str:
    """Return the message of an OpenAI error object, or the start of the text."""
    try:
        error = msgspec.json.decode(text)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError):
        return " ".join(text.split())[:_MAX_REASON]
