"""How much of the exact attention each method's choice of tokens holds, a query at a time.

AttentionPredictor, equation 4 and Table 1. Prompts go through full attention once; each layer's last queries stand for
decode steps, and every method meets them with the exact KV and its own state, so errors do not pass from layer to
layer. Invariant: a share is of one query head's attention at one step, and a method that reads everything has 1.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from evals.forward import ReferenceDecoder
from evals.methods.attention import step_logits
from evals.methods.method import DecodeMethod, PromptLayer, Step, StepResult
from evals.score_rows import Row
from lab.methods import parse_method

NUMBERS = ("recovery", "tokens", "kv_rows")
DENSE = "0-1"
"""Layers that no method is applied to."""


@dataclass(frozen=True)
class Ablation:
    """Values of the predictor's settings, each combination of them one method."""

    groups: tuple[str, ...]
    blocks: tuple[int, ...]
    histories: tuple[int, ...]
    calibrations: tuple[int, ...]
    stored: tuple[str, ...]
    rotations: tuple[int, ...]
    intervals: tuple[int, ...]
    unread: tuple[str, ...]
    sinks: tuple[int, ...]


def labels_of(budget: int, weights: Sequence[str], ablation: Ablation, choices: Sequence[str]) -> dict[str, str]:
    """Return what is compared at a budget of tokens: a table's name and the text of `parse_method`, the predictors
    first.

    choices: of `evals.methods.attention.Choice`, who chooses in the other methods; together: their name says shared.
    """
    labels = {}
    tried = (weights, ablation.groups, ablation.blocks, ablation.histories, ablation.calibrations, ablation.stored,
             ablation.rotations, ablation.intervals, ablation.unread, ablation.sinks)  # fmt: skip
    for file, group, block, history, calibrate, stored, rotate, every, unread, sink in product(*tried):
        settings = (
            f"group={group},block={block},history={history},calibrate={calibrate},stored={stored},rotate={rotate},"
            f"every={every},unread={unread},sink={sink}"
        )
        says = (file.rsplit("/", 1)[-1], group, f"b={block}", f"H={history}", f"M={calibrate}", stored,
                f"1/{rotate}" if rotate else "no share", f"every {every}", unread, f"sink {sink}")  # fmt: skip
        changed = [one for one, values in zip(says, tried, strict=True) if len(values) > 1]
        name = " ".join(["predicted", *changed])
        assert name not in labels, name
        labels[name] = f"predicted:weights={file},budget={budget},{settings},dense_layers={DENSE}"
    ends = f"budget={budget},dense_layers={DENSE}"
    others = {
        "H2O, last 64": "h2o:observe=64",
        "Quest": "quest:page=16",
        "Quest, moments": "quest:page=16,bounds=moments",
        "SnapKV": "snapkv:observe=64",
        "best blocks": "topk:block=16,sink=64,window=64",
        "top-k": "topk:block=1",
    }
    for choice in choices:
        mark = ", shared" if choice == "together" else ""
        labels |= {f"{name}{mark}": f"{text},heads={choice},{ends}" for name, text in others.items()}
    return labels | {"StreamingLLM": f"streaming:sink={budget // 2},{ends}"}


def replay_steps(method: DecodeMethod, prompt: PromptLayer, steps: int) -> Iterator[tuple[Step, StepResult, Any]]:
    """Yield the last `steps` queries of whole prompts as decode steps, with what a method makes of each, and its state.

    prompt: a layer; what stands before the last `steps` tokens is the method's prompt.
    """
    begin = prompt.lengths - steps
    longest = prompt.longest - steps
    before = prompt.once(("before", steps), lambda: PromptLayer(
        prompt.layer, prompt.queries[:, :, :longest], prompt.pre_rope_queries[:, :, :longest], prompt.keys,
        prompt.values, begin, longest))  # fmt: skip
    state = method.begin(before)
    requests = torch.arange(len(begin), device=begin.device)
    for number in range(steps):
        lengths, end = begin + number + 1, longest + number + 1
        query, plain = (of[requests, :, lengths - 1] for of in (prompt.queries, prompt.pre_rope_queries))
        step = Step(prompt.layer, query, plain, prompt.keys[:, :, :end], prompt.values[:, :, :end], lengths, end)
        yield step, method.step(step, state), state


def recovery_of(method: DecodeMethod, prompt: PromptLayer, steps: int) -> tuple[float, float, float]:
    """Return means over the last `steps` queries: the share of a query head's attention that the reads hold, the tokens
    that a query head read, and rows of KV that its heads read together of a KV head.
    """
    kept, read, rows = [], [], []
    for number, (step, result, _) in enumerate(replay_steps(method, prompt, steps)):
        exact = prompt.once(("lse", steps, number), lambda step=step: step_logits(step).logsumexp(-1))
        kept.append((result.lse - exact).exp().mean())
        read.append(result.keys_scored.mean())
        rows.append(result.rows_read.mean())
    share, tokens, together = (torch.stack(values).mean().item() for values in (kept, read, rows))
    return share, tokens, together


def measure(
    decoder: ReferenceDecoder, prompts: Sequence[Sequence[int]], budgets: Sequence[int], steps: int,
    labels: Callable[[int], dict[str, str]], advance: Callable[[], None],
) -> list[Row]:  # fmt: skip
    """Return rows of (layer, budget, method): `recovery`, a share; `tokens` and `kv_rows` read, see `recovery_of`.

    Raises ValueError for a prompt that is not longer than its steps.
    """
    sizes = [len(prompt) for prompt in prompts]
    if min(sizes) <= steps + 1:
        raise ValueError(f"recovery: a prompt of {min(sizes)} tokens, {steps} steps; ask for fewer steps")
    tokens = torch.zeros(len(prompts), max(sizes), dtype=torch.int64)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)] = torch.as_tensor(prompt)
    methods = [(budget, name, parse_method(label)) for budget in budgets for name, label in labels(budget).items()]
    rows: list[Row] = []

    def look(prompt: PromptLayer) -> None:
        for budget, name, method in methods:
            assert isinstance(method, DecodeMethod)
            if method.handles(prompt.layer, decoder.architecture.num_layers):
                recovery, read, kv_rows = recovery_of(method, prompt, steps)
                rows.append({"layer": prompt.layer, "budget": budget, "method": name, "recovery": recovery,
                             "tokens": read, "kv_rows": kv_rows, "prompts": len(sizes)})  # fmt: skip
        advance()

    lengths = torch.tensor(sizes, device=decoder.device)
    decoder.prefill(tokens.to(decoder.device), lengths, max(sizes), max(sizes), look)
    return rows


def pool(rows: Sequence[Row], key: tuple[str, ...]) -> list[Row]:
    """Return means over what is not in the key, weighted by prompts, in the order in which the keys come."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple(row[name] for name in key), []).append(row)
    pooled = []
    for values, own in groups.items():
        count = sum(row["prompts"] for row in own)
        means = {name: sum(row[name] * row["prompts"] for row in own) / count for name in NUMBERS}
        pooled.append({**dict(zip(key, values, strict=True)), **means})
    return pooled
