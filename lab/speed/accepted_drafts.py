"""Measure how many tokens of n-gram drafts a model accepts: document questions, summaries and edits, ten of each.

A text is written once without drafts, greedily. How many tokens each step would have drawn with drafts of 1, 3 and 7
tokens follows from prompt and text alone, because drafts change no token; then the same prompts are served with drafts
that are taken where they pay, and the text must be the same.
"""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from evals.tokenizer import load_tokenizer
from gpu.config import Composition, DraftConfig, GpuConfig, ModelConfig
from gpu.model.architecture import load_architecture
from gpu.sampling.sampler import count_equal
from gpu.sampling_params import SamplingParams
from scheduler.drafts.ngrams import NGrams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from transfer.machine import probe_machine

WIDTHS = (2, 4, 8)
PROFILE = "drafting"
KINDS = ("questions", "summaries", "edits")
_CONTEXT = 4096
_DOCUMENT_CHARS = 7000
_CODE_LINES = 45
_ROOT = Path(__file__).parents[2]
_QUESTION = "Quote every sentence of the document above that says something about {word}."
_SUMMARY = "Summarise the document above in a few paragraphs."
_EDIT = "Rename `{name}` to `{name}_new` everywhere in this file, and write the whole file again, unchanged otherwise."


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt of a kind."""

    kind: str
    token_ids: list[int]


@dataclass(slots=True)
class Outcome:
    """What a kind's texts took. steps: by width, without the first draw. seconds: of decoding, without and with drafts
    that are taken where they pay.
    """

    num_tokens: int = 0
    steps: dict[int, int] = field(default_factory=lambda: dict.fromkeys(WIDTHS, 0))
    seconds: dict[bool, float] = field(default_factory=lambda: {False: 0.0, True: 0.0})
    served_steps: int = 0
    num_equal: int = 0

    def tokens_a_step(self, width: int) -> float:
        return self.num_tokens / self.steps[width]


def read_tasks(model: Path, num_each: int) -> list[Task]:
    """Return the prompts: documents are this repository's pages, files to edit its smallest modules."""
    tokenizer = load_tokenizer(model)
    pages = sorted((_ROOT / "docs").rglob("*.md"), key=lambda path: -path.stat().st_size)[:num_each]
    modules = [path for path in sorted((_ROOT / "transfer").glob("*.py")) if path.stat().st_size > 1500][:num_each]
    texts = [("questions", page.read_text()[:_DOCUMENT_CHARS]) for page in pages]
    texts += [("summaries", text) for _, text in texts]
    texts += [("edits", "\n".join(path.read_text().splitlines()[:_CODE_LINES])) for path in modules]
    tasks = []
    for kind, text in texts:
        words = re.findall(r"[a-z_]{5,}", text)
        word = max(sorted(set(words)), key=words.count)
        asked = {"questions": _QUESTION, "summaries": _SUMMARY, "edits": _EDIT}[kind].format(word=word, name=word)
        turn = [{"role": "user", "content": f"{text}\n\n{asked}"}]
        token_ids = tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)
        tasks.append(Task(kind, list(token_ids)))
    return tasks


def count_steps(prompt: Sequence[int], text: Sequence[int], width: int, least_match: int) -> int:
    """Return the steps behind the first draw that write `text` with a draft of `width - 1` tokens in each."""
    source, at, steps = NGrams(least_match, np.array(prompt, np.int32)), 1, 0
    source.observe(np.array([*prompt, *text[:1]], np.int32))
    while at < len(text):
        proposal = source.propose(width - 1)
        end = min(at + 1 + count_equal(text[at:], proposal.token_ids), len(text))
        source.observe(np.array(text[at:end], np.int32))
        at, steps = end, steps + 1
    return steps


def measure_accepted(
    model: Path, num_each: int, max_tokens: int, threads: int, temperature: float
) -> dict[str, Outcome]:
    """Return what became of each kind. Texts of fewer than two tokens are left out."""
    config = EngineConfig(
        model=ModelConfig(path=model),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.5, threads=threads),
        profiles={PROFILE: Composition(draft=DraftConfig())},
        scheduler=SchedulerConfig(max_running=16, max_context_tokens=_CONTEXT),
    )
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    engine, _ = load_engine(config, plan, lambda *_: None)
    outcomes = {kind: Outcome() for kind in KINDS}
    try:
        for number, task in enumerate(read_tasks(model, num_each)):
            outcome, texts = outcomes[task.kind], {}
            for is_on in (False, True):
                engine.scheduler.drafts.is_on = is_on
                before = engine.stats()
                texts[is_on], seconds = _serve(engine, f"{number}-{is_on}", task, max_tokens, temperature)
                outcome.seconds[is_on] += seconds
                outcome.served_steps += (engine.stats().steps - before.steps) if is_on else 0
            outcome.num_equal += texts[True] == texts[False]
            outcome.num_tokens += len(texts[False]) - 1
            for width in WIDTHS:
                outcome.steps[width] += count_steps(task.token_ids, texts[False], width, DraftConfig().least_match)
    finally:
        engine.shutdown()
    return outcomes


def _serve(engine: Engine, name: str, task: Task, max_tokens: int, temperature: float) -> tuple[list[int], float]:
    """Return a text, and the seconds behind its first token."""
    most = min(max_tokens, _CONTEXT - len(task.token_ids))
    sampling = SamplingParams(temperature=temperature, seed=1)
    engine.submit([EngineRequest(
        request_id=name, prompt=pack_tokens(task.token_ids), sampling=sampling, max_tokens=most, stop_token_ids=[2],
        attention_profile=PROFILE, arrival_s=time.monotonic(),
    )])  # fmt: skip
    text: list[int] = []
    began = time.perf_counter()
    while engine.has_work:
        for delta in engine.step():
            began = began if text else time.perf_counter()
            text += delta.token_ids
            ended = time.perf_counter()
    return text, ended - began
