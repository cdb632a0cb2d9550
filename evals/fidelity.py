"""Compare a method with full attention on the same tokens: errors of layers' outputs, mass kept, next tokens.

Everything is teacher-forced: the method and full attention are fed the same tokens, so their distributions can be
compared position by position. Invariant: a layer's error is measured on the method's own inputs to that layer, so
errors of the layers before are not counted again.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from evals.decode import PrefilledBatch, decode_forced, prefill_batch
from evals.distributions import TokenSums
from evals.forward import ReferenceDecoder
from evals.meter import Fractions
from evals.methods.attention_method import DecodeMethod, MethodError, Step, StepResult
from evals.methods.baselines import parse_method
from evals.methods.full import Full
from evals.methods.key_attention import attend_all
from evals.score_rows import Row, mean_known
from evals.tasks.haystack import TextSource

CHARACTERS_A_TOKEN = 4
"""Characters of a passage that are read first; more are read if they have too few tokens."""


@dataclass(slots=True)
class LayerSums:
    """Sums over steps, requests and heads, one entry a layer; float64 on the device. terms: the number of terms."""

    error: torch.Tensor
    kept: torch.Tensor
    terms: torch.Tensor


class LayerWatch:
    """Compares each step of each layer with exact attention on the same inputs."""

    def __init__(self, layers: int, device: torch.device) -> None:
        zero = torch.zeros(layers, device=device, dtype=torch.float64)
        self._sums = LayerSums(zero, zero.clone(), zero.clone())

    def __call__(self, step: Step, result: StepResult, active: torch.Tensor) -> None:
        exact = attend_all(step)
        error = (result.out - exact.out).norm(dim=-1) / exact.out.norm(dim=-1)  # [requests, heads]
        kept = (result.lse - exact.lse).exp()
        weight = active[:, None].double().expand_as(error)
        self._sums.error[step.layer] += (error * weight).sum()
        self._sums.kept[step.layer] += (kept * weight).sum()
        self._sums.terms[step.layer] += weight.sum()

    def rows(self, label: str) -> list[Row]:
        """Return `method, layer, error, mass_kept` of the layers that the method handled."""
        error, kept = (self._sums.error / self._sums.terms).tolist(), (self._sums.kept / self._sums.terms).tolist()
        return [
            {"method": label, "layer": layer, "error": error[layer], "mass_kept": kept[layer]}
            for layer, terms in enumerate(self._sums.terms.tolist())
            if terms
        ]


def compare(
    decoder: ReferenceDecoder, prompts: Sequence[Sequence[int]], labels: Sequence[str], forced_tokens: int
) -> tuple[list[Row], list[Row]]:
    """Compare the methods of these labels; see `compare_methods`. Raises MethodError."""
    return compare_methods(decoder, prompts, {label: parse_method(label) for label in labels}, forced_tokens)


def compare_methods(
    decoder: ReferenceDecoder,
    prompts: Sequence[Sequence[int]],
    methods: Mapping[str, DecodeMethod],
    forced_tokens: int,
) -> tuple[list[Row], list[Row]]:
    """Run methods, by label, beside full attention over the last `forced_tokens` tokens of each prompt.

    The rest of a prompt is prefilled exactly. Returns rows of methods, full attention first (`method, agreement, kl,
    perplexity`, fractions and counts), and rows of their layers. Raises MethodError if a prompt is not longer than
    `forced_tokens`.
    """
    shortest = min(map(len, prompts))
    if shortest < forced_tokens + 2:
        raise MethodError(f"fidelity: a prompt of {shortest} tokens, {forced_tokens} to force; force fewer")
    heads = [list(prompt[:-forced_tokens]) for prompt in prompts]
    tails = [list(prompt[-forced_tokens:]) for prompt in prompts]
    batch = prefill_batch(decoder, heads, forced_tokens, [*methods.values(), Full()])
    exact: list[torch.Tensor] = []
    forced = torch.tensor(tails, device=decoder.device)
    base = decode_forced(batch, len(methods), tails, None, lambda _, logits: exact.append(_log_softmax(logits)))
    rows = [_row("full", Full(), 1.0, 0.0, base.nll, base.reads, forced_tokens)]
    layers: list[Row] = []
    for which, label in enumerate(methods):
        layer_rows, row = _compare_one(batch, which, label, tails, exact, forced)
        layers += layer_rows
        rows.append(row)
    return rows, layers


def _compare_one(
    batch: PrefilledBatch,
    which: int,
    label: str,
    tails: list[list[int]],
    exact: list[torch.Tensor],
    forced: torch.Tensor,
) -> tuple[list[Row], dict[str, Any]]:
    layers = LayerWatch(batch.decoder.architecture.num_layers, batch.decoder.device)
    tokens = TokenSums(exact, forced)
    run = decode_forced(batch, which, tails, layers, tokens)
    agreement, divergence = tokens.means()
    return layers.rows(label), _row(label, batch.methods[which], agreement, divergence, run.nll, run.reads, len(exact))


def _log_softmax(logits: torch.Tensor) -> torch.Tensor:
    return logits.double().log_softmax(-1)


def _row(
    label: str, method: DecodeMethod, agreement: float, kl: float, nll: Sequence[float], reads: Sequence[Fractions],
    tokens: int,
) -> Row:  # fmt: skip
    fractions = [read.to_json() for read in reads]
    return {
        "method": label,
        "settings": method.settings,
        "prompts": len(nll),
        "tokens": tokens,
        "agreement": agreement,
        "kl": kl,
        "nll": sum(nll) / len(nll),
        "perplexity": float(torch.tensor(nll, dtype=torch.float64).mean().exp()),
        **{name: mean_known([fraction.get(name) for fraction in fractions]) for name in fractions[0]},
    }


def pool_rows(batches: Sequence[list[Row]], key: tuple[str, ...], weight: str) -> list[Row]:
    """Return the rows of several batches as one. Numbers are means weighted by the field `weight`, which is summed.

    Perplexity is computed again from the mean log-likelihood.
    """
    pooled = []
    for same in zip(*batches, strict=True):
        shares = [row[weight] for row in same]
        row = dict(same[0])
        for name, value in same[0].items():
            if isinstance(value, float):
                row[name] = sum(share * other[name] for share, other in zip(shares, same, strict=True)) / sum(shares)
        row[weight] = sum(shares)
        if "nll" in row:
            row["perplexity"] = float(torch.tensor(row["nll"], dtype=torch.float64).exp())
        assert all(tuple(other[name] for name in key) == tuple(same[0][name] for name in key) for other in same)
        pooled.append(row)
    return pooled


def spread_grid(label: str) -> list[str]:
    """Expand `quest:budget=0.02|0.05,page=16|32` to the four methods of its grid."""
    name, _, rest = label.partition(":")
    if "=" not in rest:
        return [label]
    parts = [part.partition("=") for part in filter(None, rest.split(","))]
    choices = [[f"{key}={value}" for value in values.split("|")] for key, _, values in parts]
    return [name + (":" + ",".join(chosen) if chosen else "") for chosen in product(*choices)]


def text_prompts(
    tokenizer: Any, source: TextSource, length_tokens: int, num_prompts: int, seed: int
) -> list[list[int]]:
    """Return token ids of running text, `length_tokens` each, after the tokenizer's first token if it has one."""
    first = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    count = length_tokens - len(first)
    return [first + first_tokens(tokenizer, source, seed * 1_000_003 + number, count) for number in range(num_prompts)]


def first_tokens(tokenizer: Any, source: TextSource, seed: int, count: int) -> list[int]:
    """Return the first `count` token ids of a passage. Raises ValueError if the source is too short."""
    num_characters = CHARACTERS_A_TOKEN * count
    while True:
        ids = tokenizer.encode(source.passage(seed, num_characters), add_special_tokens=False)
        if len(ids) >= count:
            return ids[:count]
        num_characters = num_characters * 3 // 2


def run_fidelity(
    decoder: ReferenceDecoder,
    prompts: Sequence[Sequence[int]],
    labels: Sequence[str],
    forced_tokens: int,
    batch: int,
    advance: Callable[[], None],
) -> tuple[list[Row], list[Row]]:
    """Return `compare` over batches of prompts, pooled. Calls `advance` after each batch."""
    rows, layers = [], []
    for begin in range(0, len(prompts), batch):
        batch_rows, batch_layers = compare(decoder, prompts[begin : begin + batch], labels, forced_tokens)
        rows.append(batch_rows)
        layers.append([{**row, "prompts": batch_rows[0]["prompts"]} for row in batch_layers])
        advance()
    return pool_rows(rows, ("method",), "prompts"), pool_rows(layers, ("method", "layer"), "prompts")
