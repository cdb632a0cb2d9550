"""Run cells under serving profiles, end to end: in the engine of this process, or on any OpenAI-compatible URL.

The engine of this process decodes IN_TURNS prompts of a profile together, so what it read is known only for all of
them: each of their records has the fractions of all. What a server reads is not known. Invariant: every sample that was
tried ends as one record for each profile, failures included.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from evals.cells import Cell, PromptSettings
from evals.clients import Endpoint, ProbeError, ask_all, probe
from evals.distributions import NUM_TOP, divergence
from evals.metrics import score
from evals.run import AGREEMENT, Prompt, is_chat, name_weights, prompts_of
from evals.samples import Sample
from evals.score_rows import APPLIED, KL
from evals.served_method import PREFIX
from evals.serving import Answer, DecodeRequest, ServingEngine
from evals.stopping import RunCut
from evals.store import Ledger, Record, sample_key
from evals.tasks import CODE_VERSION
from evals.tokenizer import load_tokenizer
from gpu.model.architecture import Architecture
from server.server_url import find_root

DEFAULT = "default"
"""The method whose requests name no profile."""
IN_TURNS = 32
"""Prompts of a cell that one method answers before the next one's turn, so that a cut run still has pairs."""
LOST_AFTER = 8
"""Failures in a row, each after all its retries, after which the server is probed."""


@dataclass(frozen=True)
class Server:
    """A server that is evaluated. url: up to and with `/v1`. model: its id there."""

    url: str
    model: str
    api_key: str | None
    concurrency: int
    max_retries: int
    timeout_s: float


@dataclass(frozen=True)
class Entry:
    """Makes the keys and records of one cell under one method. told: the method's settings as its rows show them."""

    method: str
    told: dict[str, Any]
    cell: Cell
    prompts: PromptSettings
    model: str

    def key(self, sample: Sample) -> str:
        length, told = self.cell.length_tokens, self.told
        if self.cell.forced_tokens:
            told = told | {"forced_tokens": self.cell.forced_tokens}
        return sample_key(self.method, told, sample, length, self.prompts, self.model, CODE_VERSION)

    def record(self, sample: Sample, text: str, failure: str | None) -> Record:
        """Return the record of a free answer, scored by its task, or of a failure."""
        value = 0.0 if failure else score(sample.metric, text, sample.answers, sample.meta)
        return self._record(sample, text, value, failure, {})

    def record_compared(self, sample: Sample, text: str, answer: Answer, exact: torch.Tensor) -> Record:
        """Return the record of an answer whose tokens are compared with full attention's.

        exact: full attention's log probabilities at the answer's tokens, `[tokens, vocab]`. The score is the share of
        tokens whose most likely token is the same; the mean KL is measured, too.
        """
        same = [
            bool(one.top) and max(one.top, key=lambda pair: pair[1])[0] == int(row.argmax())
            for one, row in zip(answer.logprobs, exact, strict=True)
        ]
        kl = [divergence(row, dict(one.top)) for one, row in zip(answer.logprobs, exact, strict=True)]
        return self._record(sample, text, sum(same) / len(same), None, {KL: sum(kl) / len(kl)})

    def _record(
        self, sample: Sample, text: str, value: float, failure: str | None, measured: dict[str, float]
    ) -> Record:
        identity = {
            "method": self.method,
            "settings": self.told,
            "task": self.cell.task,
            "length": self.cell.length_tokens,
            "metric": AGREEMENT if self.cell.forced_tokens else sample.metric,
            "text": self.prompts.text,
            "seed": self.prompts.seed,
        }
        return Record(self.key(sample), identity, sample.sample_id, value, text, failure, sample.depth, measured)

    def missing(self, made: Sequence[Prompt], ledger: Ledger) -> list[Prompt]:
        """Return the prompts without a record; those with one are reported to the ledger."""
        keys = [self.key(prompt.sample) for prompt in made]
        for key in keys:
            if key in ledger.done:
                ledger.found(key)
        return [prompt for prompt, key in zip(made, keys, strict=True) if key not in ledger.done]


Exact = Callable[[list[int], list[int]], torch.Tensor]
"""Takes a prompt and the tokens behind it; returns full attention's log probabilities at these, float64 `[tokens,
vocab]`.
"""


def run_profiles(
    engine: ServingEngine,
    tokenizer: Any,
    shape: Architecture,
    prompts: Iterable[tuple[Cell, list[Prompt]]],
    profiles: Mapping[str, str],
    settings: PromptSettings,
    ledger: Ledger,
    exact: Exact | None,
) -> None:
    """Run cells in the engine. Methods take turns of IN_TURNS prompts.

    profiles: of the cells' methods, by name. exact: computes full attention for cells with `forced_tokens`. An engine
    chooses its own tokens, so these are fed to full attention, not the other way round.
    """
    model = name_weights(settings.model)
    for cell, made in prompts:
        entries = [Entry(method, _told(engine, profiles[method]), cell, settings, model) for method in cell.methods]
        for begin in range(0, len(made), IN_TURNS):
            for entry in entries:
                missing = entry.missing(made[begin : begin + IN_TURNS], ledger)
                profile = profiles[entry.method]
                _answer_all(engine, tokenizer, profile, list(shape.eos_token_ids), entry, missing, ledger, exact)
        ledger.finished(cell)


def _told(engine: ServingEngine, profile: str) -> dict[str, Any]:
    """Return the settings of a profile that are shown in its method's row."""
    return {"attention_profile": profile, "engine": "in process", **engine.settings_of(profile)}


def _answer_all(
    engine: ServingEngine,
    tokenizer: Any,
    profile: str,
    stop_ids: list[int],
    entry: Entry,
    missing: Sequence[Prompt],
    ledger: Ledger,
    exact: Exact | None,
) -> None:
    """Answer prompts of one cell under one profile, and record what all of them read, even if the run is cut."""
    if not missing:
        return
    forced = entry.cell.forced_tokens
    assert not forced or exact is not None, "evals: answers are compared with full attention's"
    asks = [
        DecodeRequest(str(number), prompt.token_ids.tolist(), forced or prompt.sample.max_new_tokens, stop_ids,
            NUM_TOP if forced else None)
        for number, prompt in enumerate(missing)
    ]  # fmt: skip
    kept: list[Record] = []
    before = engine.reads()
    try:
        for answer in engine.answer(asks, profile):
            prompt = missing[int(answer.key)]
            text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
            if forced and exact is not None and answer.failure is None:
                fed = [*answer.token_ids, stop_ids[0]][: len(answer.logprobs)]  # a stop token has its logprobs, too
                compared = exact(prompt.token_ids.tolist(), fed)
                kept.append(entry.record_compared(prompt.sample, text, answer, compared))
            else:
                kept.append(entry.record(prompt.sample, text, answer.failure))
            ledger.keep(kept[-1])
            ledger.check()
    finally:
        fractions, layers = engine.fractions(before, profile), engine.layers(before, profile)
        longest = max(len(prompt.token_ids) for prompt in missing)
        applied = engine.did_apply(before, profile, longest)
        told = fractions.to_json() if fractions is not None else {}
        told |= {APPLIED: float(applied)} if applied is not None else {}
        for record in kept:
            if told and record.failure is None:
                ledger.amend(replace(record, measured=record.measured | told, layers=layers))


def run_on_server(cells: Sequence[Cell], settings: PromptSettings, server: Server, ledger: Ledger) -> None:
    """Run cells on a server; their methods are `profile:NAME`, or `default` to name no profile.

    Raises ProbeError before any sample is sent if the server does not answer under one of the methods, and RunCut if
    it stops answering.
    """
    tokenizer = load_tokenizer(settings.model)
    probed: set[tuple[str, str]] = set()
    for cell, made in prompts_of(cells, settings, 0):
        asked = []
        for method in cell.methods:
            entry = Entry(method, {"url": server.url, **body_of(method)}, cell, settings, server.model)
            missing = [prompt.sample for prompt in entry.missing(made, ledger)]
            for mode, samples in by_mode(missing, settings.sent_as, tokenizer).items():
                asked.append((entry, endpoint_of(server, mode, method), samples))
        for entry, endpoint, _ in asked:
            if (entry.method, endpoint.mode) not in probed:
                asyncio.run(probe(endpoint, None))
                probed.add((entry.method, endpoint.mode))
        for entry, endpoint, samples in asked:
            asyncio.run(ask_each(endpoint, samples, entry, ledger))
        ledger.finished(cell)


def body_of(method: str) -> dict[str, str]:
    """Return the fields of a request's body that name its method."""
    return {} if method == DEFAULT else {"attention_profile": method.removeprefix(PREFIX)}


def endpoint_of(server: Server, mode: str, method: str) -> Endpoint:
    return Endpoint(server.url, server.model, mode, server.api_key, server.concurrency, server.max_retries,
                    server.timeout_s, body_of(method))  # fmt: skip


def probe_server(server: Server, methods: Sequence[str]) -> None:
    """Raise ProbeError if the server does not complete a prompt under one of the methods."""
    for method in methods:
        asyncio.run(probe(endpoint_of(server, "completions", method), None))


def by_mode(samples: Sequence[Sample], sent_as: str, tokenizer: Any) -> dict[str, list[Sample]]:
    """Return samples by the kind of request, `chat` or `completions`, that sends them."""
    modes: dict[str, list[Sample]] = {}
    for sample in samples:
        chat = is_chat(sent_as, bool(sample.meta.get("raw")), tokenizer)
        modes.setdefault("chat" if chat else "completions", []).append(sample)
    return modes


async def ask_each(endpoint: Endpoint, samples: list[Sample], entry: Entry, ledger: Ledger) -> None:
    """Ask the server, and record its answers.

    After LOST_AFTER failures in a row it is probed. Raises RunCut if it does not answer the probe.
    """
    failed = 0
    async for reply in ask_all(endpoint, samples, None):
        ledger.keep(entry.record(reply.sample, reply.text, reply.failure))
        ledger.check()
        failed = 0 if reply.failure is None else failed + 1
        if failed and failed % LOST_AFTER == 0:
            try:
                await probe(endpoint, None)
            except ProbeError as error:
                raise RunCut(str(error)) from error


def named_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Return the methods of a server run in the form that rows use: `exact` means `profile:exact`."""
    full = [method if method == DEFAULT else PREFIX + method.removeprefix(PREFIX) for method in methods]
    return tuple(dict.fromkeys(full))


def server_of(url: str, served_model: str | None, model: Path, api_key: str | None, concurrency: int) -> Server:
    """Return a server with a run's retries and timeout. Raises ValueError if the URL is not a server's address."""
    try:
        base = f"{find_root(url)}/v1"
    except ValueError as error:
        raise ValueError(f"--url: {error}") from None
    return Server(base, served_model or model.resolve().name, api_key, concurrency, max_retries=4, timeout_s=600.0)
