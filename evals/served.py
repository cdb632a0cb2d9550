"""Cells under serving profiles, end to end: in the engine of this process, or on any OpenAI-compatible URL.

It knows prompts and profiles' names, no attention. What a profile reads is not known here, so fractions are missing.
Invariant: every sample of a cell ends as one record for each profile, a failure included.
"""

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals.cells import Cell, PromptSettings
from evals.clients import Endpoint, ask_all
from evals.metrics import score
from evals.run import Prompt, is_chat, load_tokenizer, prompts_of
from evals.samples import Sample
from evals.serving import PREFIX, Ask, ServingEngine
from evals.store import Ledger, Record, sample_key
from evals.tasks import CODE_VERSION
from gpu.architecture import Architecture

DEFAULT = "default"
"""The method that names no profile to a server."""


@dataclass(frozen=True)
class Server:
    """Where to ask: `url` up to and with `/v1`. model: its id there."""

    url: str
    model: str
    api_key: str | None
    concurrency: int
    max_retries: int
    timeout_s: float


@dataclass(frozen=True)
class Entry:
    """The keys and records of one cell under one method; told: what the method's row says of its settings."""

    method: str
    told: dict[str, Any]
    cell: Cell
    prompts: PromptSettings
    model: str

    def key(self, sample: Sample) -> str:
        length = self.cell.length_tokens
        return sample_key(self.method, self.told, sample, length, self.prompts, self.model, CODE_VERSION)

    def record(self, sample: Sample, text: str, failure: str | None) -> Record:
        identity = {
            "method": self.method,
            "settings": self.told,
            "task": self.cell.task,
            "length": self.cell.length_tokens,
            "metric": sample.metric,
            "text": self.prompts.text,
        }
        value = 0.0 if failure else score(sample.metric, text, sample.answers, sample.meta)
        return Record(self.key(sample), identity, sample.sample_id, value, text, failure, sample.depth, {})

    def missing(self, made: Sequence[Prompt], ledger: Ledger) -> list[Prompt]:
        """The prompts without a record; those with one are reported to the ledger."""
        keys = [self.key(prompt.sample) for prompt in made]
        for key in keys:
            if key in ledger.done:
                ledger.found(key)
        return [prompt for prompt, key in zip(made, keys, strict=True) if key not in ledger.done]


def run_profiles(
    engine: ServingEngine,
    tokenizer: Any,
    shape: Architecture,
    prompts: Iterable[tuple[Cell, list[Prompt]]],
    settings: PromptSettings,
    ledger: Ledger,
) -> None:
    """Run cells in the engine; their methods are `profile:NAME`."""
    for cell, made in prompts:
        for method in cell.methods:
            profile = method.removeprefix(PREFIX)
            told = {"attention_profile": profile, "engine": "in process", **engine.settings_of(profile)}
            entry = Entry(method, told, cell, settings, shape.name)
            missing = entry.missing(made, ledger)
            asks = [
                Ask(
                    str(number),
                    prompt.token_ids.tolist(),
                    prompt.sample.max_new_tokens,
                    list(shape.eos_token_ids),
                    None,
                )
                for number, prompt in enumerate(missing)
            ]
            for answer in engine.answer(asks, profile):
                text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                ledger.keep(entry.record(missing[int(answer.key)].sample, text, answer.failure))
        ledger.finished(cell)


def run_on_server(cells: Sequence[Cell], settings: PromptSettings, server: Server, ledger: Ledger) -> None:
    """Run cells on a server; their methods are `profile:NAME`, or `default` to name no profile."""
    tokenizer = load_tokenizer(settings.model)
    for cell, made in prompts_of(cells, settings, 0):
        for method in cell.methods:
            extra = {} if method == DEFAULT else {"attention_profile": method.removeprefix(PREFIX)}
            entry = Entry(method, {"url": server.url, **extra}, cell, settings, server.model)
            missing = entry.missing(made, ledger)
            for mode, samples in by_mode([prompt.sample for prompt in missing], settings.sent_as, tokenizer).items():
                endpoint = Endpoint(server.url, server.model, mode, server.api_key, server.concurrency,
                                    server.max_retries, server.timeout_s, extra)  # fmt: skip
                asyncio.run(ask_each(endpoint, samples, entry, ledger.keep))
        ledger.finished(cell)


def by_mode(samples: Sequence[Sample], sent_as: str, tokenizer: Any) -> dict[str, list[Sample]]:
    """Samples by the kind of request that they are sent in."""
    modes: dict[str, list[Sample]] = {}
    for sample in samples:
        chat = is_chat(sent_as, bool(sample.meta.get("raw")), tokenizer)
        modes.setdefault("chat" if chat else "completions", []).append(sample)
    return modes


async def ask_each(endpoint: Endpoint, samples: list[Sample], entry: Entry, keep: Callable[[Record], None]) -> None:
    async for reply in ask_all(endpoint, samples, None):
        keep(entry.record(reply.sample, reply.text, reply.failure))


def named_methods(methods: Sequence[str]) -> tuple[str, ...]:
    """Methods of a server run as rows name them: `exact` and `profile:exact` are one."""
    full = [method if method == DEFAULT else PREFIX + method.removeprefix(PREFIX) for method in methods]
    return tuple(dict.fromkeys(full))


def server_of(url: str, served_model: str | None, model: Path, api_key: str | None, concurrency: int) -> Server:
    """A server with the retries and the patience of a run."""
    return Server(url, served_model or model.resolve().name, api_key, concurrency, max_retries=4, timeout_s=600.0)
