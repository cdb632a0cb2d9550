"""Measure how many tokens of drafts a model accepts: document questions, summaries and edits, ten of each.

N-grams: a text is written once without drafts, greedily. How many tokens each step would have drawn with drafts of 1, 3
and 7 tokens follows from prompt and text alone, because drafts change no token; then the same prompts are served with
drafts that are taken where they pay, and the text must be the same. A profile of a method that drafts (`indexed`) does
so beside `offloaded`, 7 tokens in each step. Of one that does not (`sampled`), its own greedy text is given to full
attention, and a draft is right up to the first token for which full attention has another one.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from bench.engine_patches import switch_drafts
from evals.tokenizer import load_tokenizer
from gpu.config import Composition, DraftConfig, GpuConfig, MethodChoice, ModelConfig
from gpu.methods.registry import list_methods
from gpu.model.architecture import load_architecture
from gpu.sampling.sampler import count_equal
from gpu.sampling_params import SamplingParams
from scheduler.drafts.ngrams import NGrams
from scheduler.engine.engine import Engine
from scheduler.engine.load_engine import load_engine
from scheduler.engine_config import EngineConfig, SchedulerConfig
from scheduler.messages import Delta, EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from transfer.host_config import HostConfig
from transfer.machine import probe_machine

WIDTHS = (2, 4, 8)
PROFILE = "drafting"
KINDS = ("questions", "summaries", "edits")
_CONTEXT = 6144
_RESIDENT = 512  # tokens, above which contexts are in host memory
_DOCUMENT_CHARS = 7000
_CODE_LINES = 45
_LONG_CHARS = 10_000  # of documents and files whose contexts are to lie in host memory: `sampled` has tables of 2,048
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


@dataclass(slots=True)
class Accepted:
    """What became of drafts by a profile. ngram_steps: that drafts by n-grams of the same width take for these texts.
    prompt_tokens: of all prompts.
    """

    num_texts: int = 0
    prompt_tokens: int = 0
    num_tokens: int = 0
    steps: int = 0
    ngram_steps: int = 0


def read_tasks(model: Path, num_each: int, is_long: bool = False) -> list[Task]:
    """Return the prompts: documents are this repository's pages, files to edit its smallest modules, or, of long ones,
    the scheduler's largest.
    """
    tokenizer = load_tokenizer(model)
    pages = sorted((_ROOT / "docs").rglob("*.md"), key=lambda path: -path.stat().st_size)[:num_each]
    texts = [("questions", page.read_text()[: _LONG_CHARS if is_long else _DOCUMENT_CHARS]) for page in pages]
    texts += [("summaries", text) for _, text in texts]
    if is_long:
        modules = sorted((_ROOT / "scheduler").rglob("*.py"), key=lambda path: -path.stat().st_size)[:num_each]
        texts += [("edits", path.read_text()[:_LONG_CHARS]) for path in modules]
    else:
        modules = [path for path in sorted((_ROOT / "transfer").glob("*.py")) if path.stat().st_size > 1500][:num_each]
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
                switch_drafts(engine.scheduler.drafts, is_on)
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


def measure_by_profile(
    model: Path, profile: str, num_each: int, max_tokens: int, threads: int, told: Callable[[str], None]
) -> dict[str, Accepted]:
    """Return what became of each kind's drafts of 7 tokens by a profile that reads the same context in host memory,
    greedy, beside what n-grams would have done for the same texts. told: hears of each text.
    """
    method = list_methods()[profile]
    settings = {"method": profile, "min_context_tokens": 0, "rings": 1, "index_tokens": _CONTEXT}
    profiles = {"exactly": Composition(), "cheaper": Composition(host=MethodChoice(method=profile))}
    if method.drafts:
        profiles["cheaper"] = Composition(host=MethodChoice.model_validate(settings))
        profiles[PROFILE] = Composition(host=MethodChoice(method="offloaded"), draft=DraftConfig(profile="cheaper"))
    config = EngineConfig(
        model=ModelConfig(path=model),
        gpu=GpuConfig(device="cpu", dtype="float32", kv_cache_gib=0.5, threads=threads),
        host=HostConfig(memory_limit_gib=1.0, threads=threads, resident_tokens=_RESIDENT, residency="fixed"),
        profiles=profiles,
        scheduler=SchedulerConfig(max_running=16, max_context_tokens=_CONTEXT, prefix_cache=False),
    )
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    engine, _ = load_engine(config, plan, lambda *_: None)
    engine.scheduler.drafts.choose_lengths = lambda looks, num_fed, times: [len(ids) for ids, _ in looks]
    outcomes = {kind: Accepted() for kind in KINDS}
    try:
        tasks = read_tasks(model, num_each, is_long=True)
        in_turns = [task for first in range(num_each) for task in tasks[first::num_each]]
        for number, task in enumerate(in_turns):
            measure = _draft_and_verify if method.drafts else _agree
            text, steps = measure(engine, f"{number}", task, max_tokens)
            own, num_drawn = outcomes[task.kind], len(text) - 1
            if num_drawn < 1:
                continue
            own.num_texts, own.prompt_tokens = own.num_texts + 1, own.prompt_tokens + len(task.token_ids)
            own.num_tokens, own.steps = own.num_tokens + num_drawn, own.steps + steps
            ngram_steps = count_steps(task.token_ids, text, WIDTHS[-1], DraftConfig().least_match)
            own.ngram_steps += ngram_steps
            told(f"{task.kind}: {len(task.token_ids)} tokens, a text of {len(text)} in {steps} steps for {ngram_steps}")
    finally:
        engine.shutdown()
    return outcomes


def _draft_and_verify(engine: Engine, name: str, task: Task, max_tokens: int) -> tuple[list[int], int]:
    """Return a text, and the steps that wrote it behind its first token."""
    before = engine.stats().drafts
    text, _ = _serve(engine, name, task, max_tokens, 0.0)
    after = engine.stats().drafts
    drafted = after.steps - before.steps
    return text, drafted + len(text) - 1 - drafted - (after.accepted - before.accepted)


def _agree(engine: Engine, name: str, task: Task, max_tokens: int) -> tuple[list[int], int]:
    """Return the text of the profile that is cheaper, and the steps of 7 of its tokens each that would write it."""
    text, _ = _serve(engine, name, task, max_tokens, 0.0, "cheaper")
    whole = Task(task.kind, [*task.token_ids, *text])
    sampling = SamplingParams(temperature=0.0, num_prompt_logprobs=1)
    (first, *_) = _ask(engine, f"{name} read", whole, 1, sampling, "exactly")
    assert first.prompt_logprobs is not None, "it was asked for"
    best = [one.top[0][0] for one in first.prompt_logprobs[-len(text) :]]
    return text, steps_of([one == other for one, other in zip(best, text, strict=True)][1:], WIDTHS[-1])


def steps_of(is_right: Sequence[bool], width: int) -> int:
    """Return the steps that write tokens of which a draft has so many right: each draws one more than it accepts."""
    at, steps = 0, 0
    while at < len(is_right):
        run = is_right[at : at + width - 1]
        at, steps = at + 1 + (run.index(False) if False in run else len(run)), steps + 1
    return steps


def _serve(
    engine: Engine, name: str, task: Task, max_tokens: int, temperature: float, profile: str = PROFILE
) -> tuple[list[int], float]:
    """Return a text, and the seconds behind its first token."""
    text: list[int] = []
    began = ended = time.perf_counter()
    for delta in _ask(engine, name, task, max_tokens, SamplingParams(temperature=temperature, seed=1), profile):
        began = began if text else time.perf_counter()
        text += delta.token_ids
        ended = time.perf_counter()
    return text, ended - began


def _ask(
    engine: Engine, name: str, task: Task, max_tokens: int, sampling: SamplingParams, profile: str
) -> Iterator[Delta]:
    """Yield what is told of a request, as it is told."""
    most = min(max_tokens, _CONTEXT - len(task.token_ids))
    engine.submit([EngineRequest(
        request_id=name, prompt=pack_tokens(task.token_ids), sampling=sampling, max_tokens=most, stop_token_ids=[2],
        attention_profile=profile, arrival_s=time.monotonic(),
    )])  # fmt: skip
    while engine.has_work:
        yield from engine.step()
