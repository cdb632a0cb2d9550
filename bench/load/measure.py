"""Run one load test from plan to numbers: find the model, count text, warm, measure, summarise.

Invariant: the notes name the assumptions of the measurement: how tokens were counted, what was cached, whether the
client was late.
"""

import asyncio
import contextlib
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from rich.console import Console
from tokenizers import Tokenizer

from bench.load.client import Client, StreamFault
from bench.load.console import show_progress
from bench.load.load_figures import Summary, summarise
from bench.load.load_plan import LoadPlan, PlanError
from bench.load.notes import list_notes
from bench.load.prompts import ConversationReader, Job, PromptMaker
from bench.load.prose import write_prose
from bench.load.rag_prompts import CorpusReader
from bench.load.records import RequestRecord
from bench.load.send_load import LoadRun
from bench.load.tokenised_text import (
    DEFAULT_CHARS_PER_TOKEN,
    TextPool,
    load_tokenizer,
    pool_by_ratio,
    pool_by_server,
    pool_by_tokenizer,
)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_POOL_CHARS = 400_000
_MAX_POOL_CHARS = 8_000_000
_CHARS_FOR_A_TOKEN = 6
_PROBE_CHARS = 2000
_CLEANING_S = 10.0  # timeout for deleting the documents of a run; a server that hangs keeps them
_WARMUP_INDEX = 1_000_003
"""Index of the first job that warms the server; the measured ones start at 0."""


@dataclass(frozen=True)
class LoadResult:
    """A finished load test. counting: how prompt tokens were counted, in words."""

    plan: LoadPlan
    model: str
    counting: str
    summary: Summary
    records: list[RequestRecord]
    notes: list[str]
    interrupted: bool


async def measure(plan: LoadPlan, console: Console) -> LoadResult:
    """Run a load test. Raises PlanError for a plan that cannot be run, StreamFault if the server is not reachable."""
    plan.check()
    tokenizer = load_tokenizer(plan.tokenizer) if plan.tokenizer else None
    client = Client(plan.base_url, plan.api_key, plan.timeout_s, plan.retries)
    document_ids: list[str] = []
    try:
        model = plan.model or await client.find_model()
        run = LoadRun(plan, client, model, _not_ready)
        run.make_job, shared_jobs, counting = await _prepare(run, tokenizer, document_ids, console)
        await _warm(run, shared_jobs, console)
        progress = asyncio.create_task(show_progress(run, console))
        try:
            with _interrupt_on_signals(run):
                await run.run()
        finally:
            progress.cancel()
            await asyncio.gather(progress, return_exceptions=True)
    finally:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_CLEANING_S):
                for document_id in document_ids:
                    await client.delete_document(document_id)
        await client.session.close()
    if tokenizer is not None:
        _count_answers(run.records, tokenizer)
    summary = summarise(run.records, run.wall_s, plan.rate, plan.slo)
    notes = list_notes(plan, summary, counting, run.interrupted)
    return LoadResult(plan, model, counting, summary, run.records, notes, run.interrupted)


async def _prepare(
    run: LoadRun, tokenizer: Tokenizer | None, document_ids: list[str], console: Console
) -> tuple[Callable[[int], Job], list[Job], str]:
    """Return the function that makes jobs, the jobs that warm the cache, and how tokens are counted.

    document_ids: the ids of documents that are stored for the run are added to it.
    """
    plan = run.plan
    if plan.conversations is not None:
        conversations = ConversationReader(plan)
        shared_jobs = conversations.make_shared() if plan.cache == "warm" else []
        if plan.cache == "warm" and not shared_jobs:
            raise PlanError("--warm: no conversation of the file has a system message; nothing is shared")
        return conversations.make, shared_jobs, "as the file has them"
    with console.status("counting tokens of the text"):
        pool = await _make_pool(run, tokenizer, _read_text(plan))
    if plan.corpus is not None:
        reader = CorpusReader(plan, plan.corpus, pool, secrets.token_hex(4))
        reader.ids = document_ids
        if plan.corpus.sent_as == "ids":
            await _store_documents(run, reader, console)
        return reader.make, [], pool.method
    maker = PromptMaker(plan, pool)
    return maker.make, [maker.make_shared()] if plan.cache == "warm" else [], pool.method


async def _store_documents(run: LoadRun, reader: CorpusReader, console: Console) -> None:
    """Store the corpus on the server, unmeasured. Raises StreamFault."""
    with console.status("") as status:
        for number, document in enumerate(reader.documents, 1):
            status.update(f"storing: document {number} of {len(reader.documents)}")
            reader.ids.append(await run.client.add_document(document["title"], document["text"]))


def _read_text(plan: LoadPlan) -> str:
    wanted_chars = max(_POOL_CHARS, 2 * _CHARS_FOR_A_TOKEN * plan.input_tokens.largest)
    if not plan.text_files:
        return write_prose(plan.seed, min(wanted_chars, _MAX_POOL_CHARS))
    parts = []
    for path in plan.text_files:
        try:
            parts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"--text: {path} cannot be read as UTF-8 text: {error}") from None
    text = "\n\n".join(parts)
    if not text.strip():
        raise PlanError("--text: the files hold no text")
    return text[:_MAX_POOL_CHARS]


async def _make_pool(run: LoadRun, tokenizer: Tokenizer | None, text: str) -> TextPool:
    if tokenizer is not None:
        return pool_by_tokenizer(text, tokenizer, str(run.plan.tokenizer))
    try:
        added = await run.client.count_tokens(run.model, "The", True) - await run.client.count_tokens(
            run.model, "The", False
        )
        return await pool_by_server(
            text[:_POOL_CHARS], added, lambda piece: run.client.count_tokens(run.model, piece, False)
        )
    except StreamFault:
        probe = await run.send_alone(_make_probe(text))
        if probe.outcome == "completed" and probe.prompt_tokens:
            ratio = len(text[:_PROBE_CHARS]) / probe.prompt_tokens
            return pool_by_ratio(text, ratio, "from the usage of one request; give --tokenizer to count exactly")
        return pool_by_ratio(text, DEFAULT_CHARS_PER_TOKEN, "assumed, the server counts nothing; give --tokenizer")


def _make_probe(text: str) -> Job:
    return Job(-1, (({"role": "user", "content": text[:_PROBE_CHARS]},),), None, 1)


async def _warm(run: LoadRun, shared_jobs: list[Job], console: Console) -> None:
    """Send the shared prefixes and the warm-up requests, unmeasured. Raises StreamFault if one of them fails."""
    jobs = shared_jobs + [run.make_job(_WARMUP_INDEX + number) for number in range(run.plan.warmup)]
    for number, job in enumerate(jobs, 1):
        with console.status(f"warming: request {number} of {len(jobs)}"):
            record = await run.send_alone(job)
        if record.outcome != "completed":
            raise StreamFault(f"warming: request {number} of {len(jobs)} failed: {record.reason}")


def _count_answers(records: list[RequestRecord], tokenizer: Tokenizer) -> None:
    """Count the tokens of each answer from its text if the server reported no usage."""
    for record in records:
        if record.output_source == "chunks" and record.text:
            record.output_tokens = len(tokenizer.encode("".join(record.text), add_special_tokens=False).ids)
            record.output_source = "tokenizer"


@contextlib.contextmanager
def _interrupt_on_signals(run: LoadRun) -> Iterator[None]:
    """End the run, but not the program, at Ctrl-C or SIGTERM. Only the main thread can handle signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    for number in _SIGNALS:
        loop.add_signal_handler(number, run.interrupt)
    try:
        yield
    finally:
        for number in _SIGNALS:
            loop.remove_signal_handler(number)


def _not_ready(index: int) -> Job:
    raise AssertionError(f"job {index} was asked for before the prompts were prepared")
