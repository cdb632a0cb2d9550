"""Prefill prompts once, then decode with any number of methods from the same KV.

Invariant: every method starts from the same cache and the same token. The prompt's last token is the first decode step,
so even the first answer token is chosen under the method. Generated tokens overwrite those of the method before, after
the prompts' ends.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from evals.forward import KvCache, ReferenceDecoder
from evals.meter import Fractions, ReadMeter
from evals.methods.attention_method import DecodeMethod, MethodError, PromptLayer, Step, StepResult
from evals.methods.key_attention import attend_all

Watch = Callable[[Step, StepResult, torch.Tensor], None]
"""Called with each handled layer's step, its result, and which rows (bool `[requests]`) are still running."""


@dataclass(frozen=True, slots=True)
class PrefilledBatch:
    """Prompts without their last token, prefilled, and the state of each method and layer."""

    decoder: ReferenceDecoder
    cache: KvCache
    last_tokens: torch.Tensor
    lengths: torch.Tensor
    longest: int
    capacity: int
    methods: tuple[DecodeMethod, ...]
    states: list[list[Any]]


@dataclass(frozen=True, slots=True)
class Decoded:
    """What one method decoded for a batch.

    tokens: the output of each request, without its stop token. reads: the fractions of keys and bytes that each request
    read. nll: mean negative log-likelihood of each request's forced tokens, in nats; empty without them.
    """

    tokens: list[list[int]]
    reads: list[Fractions]
    nll: list[float]


def prefill_batch(
    decoder: ReferenceDecoder,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    methods: Sequence[DecodeMethod],
) -> PrefilledBatch:
    """Prefill `prompts` exactly (token ids, two or more each), leaving room for `max_new_tokens`.

    Raises MethodError if a prompt with its answer exceeds the model's positions.
    """
    device = decoder.device
    sizes = [len(prompt) - 1 for prompt in prompts]
    longest, room = max(sizes), decoder.architecture.max_context_tokens
    if min(sizes) < 1:
        raise MethodError(f"prompt {sizes.index(min(sizes))}: {min(sizes) + 1} tokens; wanted 2 or more")
    if longest + 1 + max_new_tokens > room:
        raise MethodError(
            f"prompt of {longest + 1} tokens and an answer of {max_new_tokens}: the model has {room} positions; "
            "ask for a shorter length"
        )
    tokens = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : sizes[row]] = torch.as_tensor(prompt[:-1])
    lengths = torch.tensor(sizes, device=device)
    num_layers = decoder.architecture.num_layers
    states: list[list[Any]] = [[None] * num_layers for _ in methods]  # layers with a window have none

    def begin(prompt: PromptLayer) -> None:
        for method, layers in zip(methods, states, strict=True):
            if method.handles(prompt.layer, num_layers):
                layers[prompt.layer] = method.begin(prompt)

    capacity = longest + 1 + max_new_tokens
    cache, _ = decoder.prefill(tokens.to(device), lengths, longest, capacity, begin)
    last = torch.tensor([prompt[-1] for prompt in prompts], device=device)
    return PrefilledBatch(decoder, cache, last, lengths, longest, capacity, tuple(methods), states)


@torch.inference_mode()
def decode_greedy(
    batch: PrefilledBatch, which: int, max_new_tokens: int, stop_ids: frozenset[int], watch: Watch | None
) -> Decoded:
    """Decode greedily by method number `which`. A row ends at a stop token or after `max_new_tokens`."""
    stop = torch.tensor(sorted(stop_ids), device=batch.lengths.device, dtype=torch.int64)
    active = torch.ones_like(batch.lengths, dtype=torch.bool)
    run = _Run(batch, which, watch)
    tokens, out = batch.last_tokens, []
    for _ in range(max_new_tokens):
        tokens = run.step(tokens, active).argmax(-1)
        active = active & ~torch.isin(tokens, stop)
        out.append(torch.where(active, tokens, -1))
        if not active.any():
            break
    rows = torch.stack(out, dim=1).tolist()
    kept = [row[: row.index(-1)] if -1 in row else row for row in rows]
    return Decoded(kept, run.meter.read(), [])


@torch.inference_mode()
def decode_forced(
    batch: PrefilledBatch,
    which: int,
    forced: Sequence[Sequence[int]],
    watch: Watch | None,
    watch_logits: Callable[[int, torch.Tensor], None] | None,
) -> Decoded:
    """Feed given tokens, and return for each request the tokens that the method would have chosen instead.

    watch_logits: called with each step's number and its float32 logits `[requests, vocab]`.
    """
    device = batch.lengths.device
    most = max(len(row) for row in forced)
    given = torch.tensor([list(row) + [-1] * (most - len(row)) for row in forced], device=device)
    run = _Run(batch, which, watch)
    tokens, choices, losses = batch.last_tokens, [], []
    for number in range(most):
        logits = run.step(tokens, given[:, number] >= 0)
        if watch_logits is not None:
            watch_logits(number, logits)
        choices.append(logits.argmax(-1))
        tokens = given[:, number].clamp(min=0)
        losses.append(torch.nn.functional.cross_entropy(logits, tokens, reduction="none"))
    rows = torch.stack(choices, dim=1).tolist()
    real = given >= 0
    nll = (torch.stack(losses, dim=1).double() * real).sum(1) / real.sum(1)
    kept = [row[: len(wanted)] for row, wanted in zip(rows, forced, strict=True)]
    return Decoded(kept, run.meter.read(), nll.tolist())


class _Run:
    """One method's decode over a batch: the current length, the layers' states and the meter of reads."""

    def __init__(self, batch: PrefilledBatch, which: int, watch: Watch | None) -> None:
        self._batch, self._watch = batch, watch
        self._method, self._states = batch.methods[which], batch.states[which]
        self._lengths, self._longest = batch.lengths, batch.longest
        self.meter = ReadMeter(len(batch.lengths), batch.lengths.device)

    def step(self, tokens: torch.Tensor, active: torch.Tensor) -> torch.Tensor:
        """Return logits after `tokens`; only rows in `active` are metered."""
        self._lengths, self._longest = self._lengths + 1, self._longest + 1

        def attend(step: Step) -> StepResult:
            handled = self._method.handles(step.layer, self._batch.decoder.architecture.num_layers)
            result = self._method.step(step, self._states[step.layer]) if handled else attend_all(step)
            self.meter.add(
                result.keys_scored.mean(1) / step.lengths, result.rows_read.mean(1) / step.lengths, handled, active
            )
            if handled and (read := self._method.read_between(step, result)) is not None:
                self.meter.add_read(read, active)
            if result.accepted is not None and result.skipped is not None:
                self.meter.add_reused(result.accepted, result.skipped, active)
            if handled and self._watch is not None:
                self._watch(step, result, active)
            return result

        return self._batch.decoder.step(self._batch.cache, tokens, self._lengths, self._longest, attend)
