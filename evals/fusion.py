"""Compare policies that reuse document chunks, in the serving engine: accuracy, next-token KL, attention maps.

A3 (the paper's tables and figure 3). Each prompt is answered under every policy, vanilla first; the first one that
needs a chunk stores it. Invariants: all policies get the same token ids. Policies of the same ratio compute the same
number of tokens again. Results at any time cover only prompts that all policies have answered.
"""

import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import numpy as np
import torch
from torch import Tensor

from evals import metrics
from evals.fusion_prompts import FusionPrompt
from evals.paired import FEWEST_PROMPTS, paired_interval
from evals.score_rows import Row
from evals.serving import make_deployment
from evals.stopping import RunCut, Stop
from evals.tokenizer import load_tokenizer
from gpu.attention.prefill_query import PrefillQuery
from gpu.fusion.fusion_plan import VANILLA, chooses_tokens
from gpu.model.architecture import read_architecture
from gpu.sampling_params import SamplingParams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig
from scheduler.fusion_labels import parse_fusions
from scheduler.messages import ChunkSpan, EngineRequest, Fusion, Logprob, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from transfer.host_config import DocumentsConfig
from transfer.machine import probe_machine

NUM_TOP = 256  # tokens whose logprobs are compared, and the rest as one
TOGETHER = {"cuda": 16, "cpu": 4}  # prompts that all policies answer before the next ones come
STORE_GIB = 8.0
MEMORY = Path("/dev/shm")
LEAST_MASS = 1e-9


@dataclass(frozen=True)
class PolicyRun:
    """One policy with its settings. `label`: as it was asked for."""

    label: str
    fusion: Fusion | None

    @property
    def control(self) -> Fusion | None:
        """Return the policy to beat: it computes as many tokens again in the same layers, but random ones."""
        if self.fusion is None or not chooses_tokens(self.fusion.policy):
            return None
        return msgspec.structs.replace(self.fusion, policy="random")


@dataclass
class Judged:
    """One policy's results, prompt by prompt. divergences: KL of the first token. along: the mean KL along vanilla's
    answer up to where this one differs. distances: of attention maps, `[layers]` each, for the first prompts.
    """

    run: PolicyRun
    scores: list[float] = field(default_factory=list)
    tasks: list[str] = field(default_factory=list)
    divergences: list[float] = field(default_factory=list)
    along: list[float] = field(default_factory=list)
    distances: list[np.ndarray] = field(default_factory=list)
    recomputed: list[float] = field(default_factory=list)
    chunks: list[int] = field(default_factory=list)


def parse_policies(labels: Sequence[str], ratios: Sequence[float]) -> list[PolicyRun]:
    """Return vanilla, and the policies that the labels name (`scheduler.fusion_labels`). Raises ValueError."""
    asked = [PolicyRun(label, fusion) for label in labels for fusion in parse_fusions(label, ratios)]
    return [PolicyRun(VANILLA, None), *asked]


@contextmanager
def fusion_engine(model: Path, device: str, longest_tokens: int, rows: str, chunk_tokens: int) -> Iterator[Engine]:
    """Yield an engine whose document store is in memory and removed at the end.

    longest_tokens: the most tokens of a prompt with its answer. Raises ValueError for chunks too long to be stored.
    """
    made = make_deployment(model, device, longest_tokens, None)
    with TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as folder:
        documents = DocumentsConfig.model_validate({"folder": folder, "disk_limit_gib": STORE_GIB, "rows": rows})
        config = EngineConfig(
            model=made.model,
            gpu=made.gpu.model_copy(update={"device": "cuda" if device.startswith("cuda") else "cpu"}),
            scheduler=made.scheduler.model_copy(update={"prefix_cache": False}),
            documents=documents,
        )
        plan = plan_engine(config, read_architecture(model), probe_machine())
        most = min(plan.chunk_tokens, plan.max_hidden_tokens)
        if chunk_tokens > most:
            raise ValueError(
                f"--chunk: got {chunk_tokens}; wanted {most} at most, a unit of prefill here: longer chunks are text, "
                "and all policies would be vanilla"
            )
        engine, _ = load_engine(config, plan, lambda *_: None)
        try:
            yield engine
        finally:  # its threads would outlive a run that fails
            engine.shutdown()
        del engine
        gc.collect()


def judge(
    engine: Engine, model: Path, prompts: Mapping[int, Sequence[FusionPrompt]], runs: Sequence[PolicyRun],
    num_maps: int, advance: Callable[[], None], stop: Stop, together: int,
) -> Iterator[dict[int, list[Judged]]]:  # fmt: skip
    """Yield all policies' results so far, by length, after each batch of `together` prompts; lengths take turns.

    prompts: by length. runs: vanilla first. num_maps: prompts of each length whose attention maps are compared. It ends
    when it is stopped, or when the next batch would take longer than the time left.
    """
    tokenizer, architecture = load_tokenizer(model), read_architecture(model)
    judged = {length: [Judged(run) for run in runs] for length in prompts}
    took = dict.fromkeys(prompts, 0.0)
    most = max(map(len, prompts.values()), default=0)
    for begin, length in itertools.product(range(0, most, together), prompts):
        some, began = prompts[length][begin : begin + together], time.monotonic()
        if not some:
            continue
        answers, maps = [], []
        try:
            stop.check_room(took[length])
            for run in runs:
                answers.append(_answer_all(engine, some, run, list(architecture.eos_token_ids)))
                advance()
                stop.check()
            for prompt in some[: max(0, num_maps - begin)]:
                maps.append(_compare_maps(engine, prompt, runs))
                stop.check()
        except RunCut:
            return
        for number, (one, mine) in enumerate(zip(judged[length], answers, strict=True)):
            one.distances += [far[number] for far in maps]
            for prompt, answer, exact in zip(some, mine, answers[0], strict=True):
                one.tasks.append(prompt.task)
                text = tokenizer.decode(answer.token_ids, skip_special_tokens=True)
                one.scores.append(metrics.score(prompt.metric, text, prompt.answers, prompt.meta))
                apart = divergences_along(exact, answer, architecture.vocab_size)
                one.divergences.append(apart[0])
                one.along.append(sum(apart) / len(apart))
                one.recomputed.append(answer.recomputed / len(prompt.token_ids))
                one.chunks.append(len(prompt.spans))
        took[length] = time.monotonic() - began
        yield judged


def divergences_along(exact: "Answer", other: "Answer", vocab_size: int) -> list[float]:
    """Return the KL of tokens with the same text before them: up to the first difference from the exact answer."""
    found = []
    for mine, its in zip(exact.logprobs, other.logprobs, strict=False):
        found.append(divergence(mine, its, vocab_size))
        if mine.top[0][0] != its.top[0][0]:  # the likeliest are drawn
            break
    return found


def divergence(exact: Logprob, other: Logprob, vocab_size: int) -> float:
    """Return the KL divergence of the other's next token from the exact one's, in nats.

    It is over the exact one's NUM_TOP tokens, with all other tokens as one.
    """
    listed = dict(other.top)
    rest = max(1.0 - sum(map(math.exp, listed.values())), LEAST_MASS)
    floor = math.log(rest / max(1, vocab_size - len(listed)))
    total = left = left_other = 0.0
    for token, logprob in exact.top:
        mass, here = math.exp(logprob), listed.get(token, floor)
        total += mass * (logprob - here)
        left, left_other = left + mass, left_other + math.exp(here)
    left, left_other = max(1.0 - left, LEAST_MASS), max(1.0 - left_other, LEAST_MASS)
    return max(0.0, total + left * math.log(left / left_other))


@dataclass
class Answer:
    """The answer to one prompt. logprobs: of each drawn token, including the stop token. recomputed: tokens of chunks
    that were computed again.
    """

    logprobs: list[Logprob]
    token_ids: list[int]
    recomputed: int


def _answer_all(
    engine: Engine, prompts: Sequence[FusionPrompt], run: PolicyRun, stop_token_ids: list[int]
) -> list[Answer]:
    """Return the answers in the order of the prompts. Raises ValueError for a prompt that the engine cannot answer."""
    answers: dict[str, Answer] = {}
    engine.submit([_request(prompt, run, prompt.max_new_tokens, stop_token_ids) for prompt in prompts])
    while engine.has_work:
        for delta in engine.step():
            if delta.finish_reason == "error":
                raise ValueError(f"{delta.request_id} under {run.label}: {delta.error}")
            if delta.request_id not in answers:
                answers[delta.request_id] = Answer([], [], delta.figures.get("recomputed_tokens", 0))
            answers[delta.request_id].logprobs += delta.logprobs or []
            answers[delta.request_id].token_ids += [one for one in delta.token_ids if one not in stop_token_ids]
    return [answers[prompt.name] for prompt in prompts]


def _request(prompt: FusionPrompt, run: PolicyRun, max_tokens: int, stop_token_ids: list[int]) -> EngineRequest:
    return EngineRequest(
        request_id=prompt.name,
        prompt=pack_tokens(prompt.token_ids),
        sampling=SamplingParams(temperature=0.0, num_logprobs=NUM_TOP),
        max_tokens=max_tokens,
        stop_token_ids=stop_token_ids,
        attention_profile="exact",
        arrival_s=time.monotonic(),
        chunks=tuple(ChunkSpan(*span) for span in prompt.spans),
        fusion=run.fusion,
    )


def _compare_maps(engine: Engine, prompt: FusionPrompt, runs: Sequence[PolicyRun]) -> list[np.ndarray]:
    """Return for each layer how the question's attention over the prompt differs from vanilla's: the L2 distance over
    vanilla's norm.
    """
    exact: dict[int, Tensor] = {}
    found = []
    for run in runs:
        maps = _question_maps(engine, prompt, run)
        exact = exact or maps
        found.append(np.array([float((maps[at] - exact[at]).norm() / exact[at].norm()) for at in sorted(exact)]))
    return found


def _question_maps(engine: Engine, prompt: FusionPrompt, run: PolicyRun) -> dict[int, Tensor]:
    """Return the question's attention maps by layer: float32 `[heads, question, tokens]`."""
    begin, num_tokens = prompt.spans[-1][1], len(prompt.token_ids)
    found: dict[int, list[Tensor]] = {}

    def note(query: PrefillQuery) -> None:
        own = query.positions >= begin
        if query.num_prompt_tokens == num_tokens and bool(own.any()):
            found.setdefault(query.layer, []).append(attention_map(query, own, num_tokens))

    with _noted_queries(engine, note):
        _answer_all(engine, [replace(prompt, max_new_tokens=1)], run, [])
    return {layer: torch.cat(parts, 1) for layer, parts in found.items()}


@contextmanager
def _noted_queries(engine: Engine, note: Callable[[PrefillQuery], None]) -> Iterator[None]:
    """Call `note` with all queries of prompts until the block ends, in layers without a window, for methods without
    rings.
    """
    attention = engine._runner._prefill.attention
    show, show_tail, sees = attention._show, attention._show_tail, attention.sees

    def show_and_note(query: PrefillQuery, slot: int) -> None:
        note(query)
        show(query, slot)

    attention.sees = lambda slot: True  # so the last layer computes all queries, too
    attention._show = show_and_note
    attention._show_tail = lambda state, unit, query: note(query)
    try:
        yield
    finally:
        attention._show, attention._show_tail, attention.sees = show, show_tail, sees


def attention_map(query: PrefillQuery, own: Tensor, num_tokens: int) -> Tensor:
    """Return the attention of the rows `own`, bool `[tokens]`: float32 `[heads, rows, num_tokens]`."""
    rows, positions = query.query[own].float(), query.positions[own]
    group = rows.shape[1] // query.keys.shape[0]
    end = int(positions.max()) + 1
    keys = query.keys[:, :end].float().repeat_interleave(group, 0)
    logits = torch.einsum("qhd,hcd->hqc", rows, keys) * query.scale
    logits.masked_fill_(torch.arange(end, device=keys.device) > positions[:, None], -torch.inf)
    return torch.nn.functional.pad(logits.softmax(-1), (0, num_tokens - end))


def fusion_rows(judged: Sequence[Judged], length: int) -> list[Row]:
    """Return a row for each policy, ratio and task, and one for all tasks together, which also has KL and distances.

    `difference` (`difference_low` to `_high`, 95 %): of the score from vanilla's. `kl_spared` (`spared_error`, half of
    a 95 % interval): how much less KL it has than its control. Both are paired, prompt by prompt.
    """
    rows: list[Row] = []
    exact = judged[0]
    if not exact.scores:
        return rows
    for one in judged:
        fusion = one.run.fusion
        controls = [other for other in judged if one.run.control and other.run.fusion == one.run.control != fusion]
        told = {
            "length": length,
            "policy": one.run.label,
            "ratio": fusion.ratio if fusion is not None and chooses_tokens(fusion.policy) else None,
        }
        for task in ["all", *dict.fromkeys(one.tasks)]:
            own = [number for number, name in enumerate(one.tasks) if task in ("all", name)]
            scores, divergences = np.array(one.scores)[own], np.array(one.divergences)[own]
            row: Row = {
                **told, "task": task, "prompts": len(own), "score": 100 * scores.mean(),
                **_mean_and_error("kl", "kl_error", divergences),
                **_mean_and_error("kl_along", "along_error", np.array(one.along)[own]),
                "recomputed": float(np.mean(np.array(one.recomputed)[own])),
            }  # fmt: skip
            if one.chunks:
                row["chunks"] = float(np.mean(np.array(one.chunks)[own]))
            if len(own) >= FEWEST_PROMPTS and one is not exact:
                gap = paired_interval(scores.tolist(), np.array(exact.scores)[own].tolist())
                row |= {"difference": gap.mean, "difference_low": gap.low, "difference_high": gap.high}
            for control in controls[:1]:
                row |= _mean_and_error("kl_spared", "spared_error", np.array(control.divergences)[own] - divergences)
            if task == "all" and one.distances:
                row["distances"] = np.mean(one.distances, axis=0).tolist()
            rows.append(row)
    return rows


def _mean_and_error(name: str, error: str, values: np.ndarray) -> Row:
    """Return a mean and half of its 95 % interval."""
    half = 1.96 * values.std(ddof=1) / math.sqrt(len(values)) if len(values) > 1 else None
    return {name: values.mean(), error: half}
