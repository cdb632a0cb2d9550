"""Hold the plan of one load test, parse its option strings, and check options against each other.

Invariant: a LoadPlan that passed `check` can be run. Options that contradict each other raise PlanError with one line
that names what to change.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from server.server_url import find_root

SLO_KEYS = ("ttft", "tpot", "gap", "e2el")


class PlanError(Exception):
    """Options that cannot be run. The message is one line: the option, what it got, what was wanted."""


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths in tokens: uniform over `low..high`, or one of `values` with `shares` that sum to 1."""

    values: tuple[int, ...]
    shares: tuple[float, ...]
    span: tuple[int, int] | None

    @property
    def largest(self) -> int:
        return self.span[1] if self.span else max(self.values)

    def draw(self, rng: np.random.Generator) -> int:
        """Draw one length in tokens."""
        if self.span:
            return int(rng.integers(self.span[0], self.span[1] + 1))
        return int(self.values[rng.choice(len(self.values), p=self.shares)])


def parse_lengths(option: str, text: str) -> Lengths:
    """Parse `1000`, a range `500-2000`, or a list `500,2000`, with shares as `500:0.8,2000:0.2`, in tokens.

    Raises PlanError.
    """
    wanted = "wanted tokens as 1000, 500-2000, 500,2000 or 500:0.8,2000:0.2"
    try:
        if "-" in text:
            low, high = (int(part) for part in text.split("-"))
            lengths = Lengths((), (), (low, high))
            smallest = low if low <= high else 0
        else:
            pairs = [part.split(":") for part in text.split(",")]
            values = tuple(int(pair[0]) for pair in pairs)
            weights = [float(pair[1]) if len(pair) == 2 else 1.0 for pair in pairs]
            if min(weights) <= 0 or not math.isfinite(sum(weights)) or any(len(pair) > 2 for pair in pairs):
                raise ValueError("a share must be positive")
            lengths = Lengths(values, tuple(weight / sum(weights) for weight in weights), None)
            smallest = min(values)
    except ValueError:
        raise PlanError(f"{option}: got {text!r}; {wanted}") from None
    if smallest < 1:
        raise PlanError(f"{option}: got {text!r}; lengths start at 1 and a range goes upwards")
    return lengths


def parse_slo(text: str) -> dict[str, float]:
    """Parse `ttft:2000,tpot:100,e2el:30000,gap:500`, limits in ms, to a mapping; `gap` is a request's largest.

    Raises PlanError.
    """
    limits: dict[str, float] = {}
    for part in filter(None, text.split(",")):
        key, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if key not in SLO_KEYS or not limit > 0:
            raise PlanError(f"--slo: got {part!r}; wanted KEY:MS with KEY one of {', '.join(SLO_KEYS)} and MS above 0")
        limits[key] = limit
    return limits


@dataclass(frozen=True)
class Corpus:
    """Documents of a load of the kind `rag`, and how they are sent with prompts.

    tokens: of a document. per_prompt: number of different documents in a prompt. zipf: the document of rank r is drawn
    in proportion to r ** -zipf. sent_as: by the server's ids, as texts in `documents`, or as text in the message
    (without `documents`). turns: questions that are asked about a prompt's documents, one after the other.
    """

    num_documents: int
    tokens: Lengths
    per_prompt: int
    zipf: float
    sent_as: Literal["ids", "inline", "text"]
    turns: int

    @property
    def shape(self) -> str:
        turns = f", {self.turns} turns" if self.turns > 1 else ""
        return (
            f"{self.per_prompt} of {self.num_documents} documents of {describe_lengths(self.tokens)}, "
            f"Zipf {self.zipf:g}, as {self.sent_as}{turns}"
        )


@dataclass(frozen=True)
class LoadPlan:
    """One load test. Times are seconds, lengths tokens. `requests` counts prompts or whole conversations."""

    url: str
    api_key: str | None
    model: str | None
    endpoint: Literal["completions", "chat"]
    concurrency: int | None
    rate: float | None
    burstiness: float
    requests: int | None
    duration_s: float | None
    input_tokens: Lengths
    output_tokens: Lengths
    shared_prefix_share: float
    cache: Literal["warm", "cold", "as it comes"]
    text_files: tuple[Path, ...]
    tokenizer: Path | None
    conversations: Path | None
    corpus: Corpus | None
    ignore_eos: bool
    include_usage: bool
    attention_profile: str | None
    extra_body: Mapping[str, Any]
    temperature: float
    seed: int
    slo: Mapping[str, float]
    timeout_s: float
    retries: int
    warmup: int

    @property
    def base_url(self) -> str:
        return find_root(self.url)

    @property
    def is_open_loop(self) -> bool:
        return self.rate is not None

    def check(self) -> None:
        """Raise PlanError for options that contradict each other."""
        try:
            find_root(self.url)
        except ValueError as error:
            raise PlanError(f"--url: {error}") from None
        if self.rate is not None and not (0 < self.rate < math.inf):
            raise PlanError(f"--rate: got {self.rate}; wanted requests per second above 0")
        if self.rate is None and self.concurrency is None:
            raise PlanError("arrival: got neither --rate nor --concurrency; give one")
        if not self.burstiness > 0:
            raise PlanError(f"--burstiness: got {self.burstiness}; wanted above 0 (1 is Poisson, less comes in bursts)")
        if self.requests is None and self.duration_s is None:
            raise PlanError("length: got neither --requests nor --duration; give one")
        if self.requests is not None and self.duration_s is not None:
            raise PlanError("length: got both --requests and --duration; give one")
        if not 0 <= self.shared_prefix_share <= 1:
            raise PlanError(f"--shared-prefix-share: got {self.shared_prefix_share}; wanted 0 to 1")
        self._check_prompts()

    def _check_prompts(self) -> None:
        if self.corpus is not None:
            self._check_corpus(self.corpus)
            return
        if self.conversations is not None:
            if self.endpoint != "chat":
                raise PlanError("--conversations: got --endpoint completions; conversations need --endpoint chat")
            if self.shared_prefix_share > 0 or self.text_files:
                raise PlanError(
                    "--conversations: got --shared-prefix-share or --text; the file's own text is what is sent"
                )
        elif self.cache == "warm" and self.shared_prefix_share == 0:
            raise PlanError("--warm: nothing is shared between prompts; set --shared-prefix-share above 0")

    def _check_corpus(self, corpus: Corpus) -> None:
        if self.endpoint != "chat":
            raise PlanError("--kind rag: got --endpoint completions; documents come with --endpoint chat")
        if self.conversations is not None or self.text_files or self.shared_prefix_share > 0:
            raise PlanError("--kind rag: got --conversations, --text or --shared-prefix-share; it writes its own texts")
        if self.cache != "as it comes":
            raise PlanError(f"--kind rag: got --{self.cache}; documents are what is shared, --seed gives new ones")
        if not 1 <= corpus.per_prompt <= corpus.num_documents:
            most = corpus.num_documents
            raise PlanError(f"--documents-per-prompt: got {corpus.per_prompt}; wanted 1 to the {most} of --documents")
        if not 0 <= corpus.zipf < math.inf:
            raise PlanError(f"--zipf: got {corpus.zipf}; wanted 0 (all alike) or above")

    @property
    def shape(self) -> str:
        """Return the load in one phrase, for the `shape` of a benchmark row."""
        arrival = f"rate {self.rate:g}/s" if self.rate is not None else f"concurrency {self.concurrency}"
        if self.corpus is not None:
            asked = f"question {describe_lengths(self.input_tokens)} out {describe_lengths(self.output_tokens)}"
            return f"rag {self.corpus.shape}, {asked}, {arrival}"
        if self.conversations is not None:
            return f"{self.endpoint} conversations of {self.conversations.name}, {arrival}"
        return (
            f"{self.endpoint} in {describe_lengths(self.input_tokens)} out {describe_lengths(self.output_tokens)} "
            f"shared {self.shared_prefix_share:g}, {arrival}, cache {self.cache}"
        )


def describe_lengths(lengths: Lengths) -> str:
    """Return the distribution in the syntax that parse_lengths reads."""
    if lengths.span:
        return f"{lengths.span[0]}-{lengths.span[1]}"
    if len(lengths.values) == 1:
        return str(lengths.values[0])
    return ",".join(f"{value}:{share:.3g}" for value, share in zip(lengths.values, lengths.shares, strict=True))
