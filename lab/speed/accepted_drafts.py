"""Measure how many tokens of drafts a model accepts: document questions, summaries and edits, ten of each.

N-grams: a text is written once without drafts, greedily. Since drafts change no token, prompt and text alone determine
how many tokens each step would have drawn with drafts of 1, 3 and 7 tokens. Then the same prompts are served with
drafts that are taken where they pay off, and the text must be the same. A profile whose method drafts (`indexed`)
drafts 7 tokens in each step of `offloaded`. A method that does not draft (`sampled`) writes its own greedy text, which
is given to full attention: a draft is right up to the first token for which full attention has another one.
"""

import re
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

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
from scheduler.messages import ACCEPTED, Delta, EngineRequest, pack_tokens
from scheduler.planning.engine_memory import plan_engine
from transfer.host_config import HostConfig
from transfer.machine import probe_machine

WIDTHS = (2, 4, 8)
PROFILE = "drafting"
KINDS = ("questions", "summaries", "edits")
_CONTEXT = 6144
_RESIDENT = 512  # longer contexts, in tokens, are in host memory
_DOCUMENT_CHARS = 7000
_CODE_LINES = 45
_LONG_CHARS = 10_000  # of documents and files for contexts in host memory: `sampled` builds tables from 2,048 tokens
_ROOT = Path(__file__).parents[2]
_QUESTION = "Quote every sentence of the document above that says something about {word}."
_SUMMARY = "Summarise the document above in a few paragraphs."
_EDIT = "Rename `{name}` to `{name}_new` everywhere in this file, and write the whole file again, unchanged otherwise."


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, and the kind it belongs to."""

    kind: str
    token_ids: list[int]


@dataclass(slots=True)
class Outcome:
    """The results of a kind's texts. steps: by width, without the first draw. seconds: of decoding, without drafts and
    with drafts that are taken where they pay off.
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
    """The results of drafts by a profile. ngram_steps: steps for the same texts with n-gram drafts of the same width.
    prompt_tokens: of all prompts.
    """

    num_texts: int = 0
    prompt_tokens: int = 0
    num_tokens: int = 0
    steps: int = 0
    ngram_steps: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Where texts are written. streams: requests that run at once."""

    device: Literal["cpu", "cuda"]
    threads: int
    streams: int


@dataclass(slots=True)
class Answer:
    """The tokens, figures and log probabilities that a request returned."""

    token_ids: list[int] = field(default_factory=list)
    figures: dict[str, int] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)


def read_tasks(model: Path, num_each: int, is_long: bool = False) -> list[Task]:
    """Return the prompts: documents are this repository's pages, files to edit its smallest modules.

    is_long: the texts are longer, and the files are the scheduler's largest modules.
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
    """Return how many steps after the first draw write `text` with a draft of `width - 1` tokens in each."""
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
    """Return the results of each kind. Texts of fewer than two tokens are left out."""
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


def measure_by_profiles(
    model: Path, profiles: Sequence[str], num_each: int, max_tokens: int, run: Run, told: Callable[[str], None]
) -> dict[str, dict[str, Accepted]]:
    """Measure drafts of 7 tokens by profiles that read the same context in host memory, greedily.

    Returns the results by profile and kind, with those of n-grams for the same texts. told: called with a line for each
    text.
    """
    composed = {"exactly": Composition()}
    for profile in profiles:
        settings = {"method": profile}
        if list_methods()[profile].drafts:
            settings |= {"min_context_tokens": 0, "rings": run.streams, "index_tokens": run.streams * _CONTEXT}
            verified = MethodChoice(method="offloaded"), DraftConfig(profile=f"by-{profile}")
            composed[f"{PROFILE}-{profile}"] = Composition(host=verified[0], draft=verified[1])
        composed[f"by-{profile}"] = Composition(host=MethodChoice.model_validate(settings))
    rows = WIDTHS[-1] * run.streams
    sizes = {"graph_batch_sizes": (run.streams, rows), "prefill_graph_sizes": ()} if run.device == "cuda" else {}
    config = EngineConfig(
        model=ModelConfig(path=model),
        gpu=GpuConfig(
            device=run.device, dtype="auto" if run.device == "cuda" else "float32",
            kv_cache_gib=0.25 + 0.25 * run.streams, threads=run.threads, **sizes,
        ),
        host=HostConfig(
            memory_limit_gib=1.0 + run.streams, threads=run.threads, resident_tokens=_RESIDENT, residency="fixed",
            link_share=0.0,
        ),
        profiles=composed,
        scheduler=SchedulerConfig(max_running=rows, max_context_tokens=_CONTEXT, prefix_cache=False),
    )  # fmt: skip
    plan = plan_engine(config, load_architecture(config.model), probe_machine())
    engine, _ = load_engine(config, plan, lambda *_: None)
    told("the engine is ready")
    engine.scheduler.drafts.choose_lengths = lambda looks, num_fed, times: [len(ids) for ids, _ in looks]
    outcomes = {profile: {kind: Accepted() for kind in KINDS} for profile in profiles}
    tasks = read_tasks(model, num_each, is_long=True)
    in_turns = [task for first in range(num_each) for task in tasks[first::num_each]]
    try:
        for profile in profiles:
            for begin in range(0, len(in_turns), run.streams):
                own = in_turns[begin : begin + run.streams]
                measure = _draft_and_verify if list_methods()[profile].drafts else _agree
                for task, (text, steps) in zip(own, measure(engine, profile, own, max_tokens), strict=True):
                    _note(
                        outcomes[profile][task.kind], task, text, steps, lambda line, of=profile: told(f"{of}: {line}")
                    )
    finally:
        engine.shutdown()
    return outcomes


def _note(one: Accepted, task: Task, text: list[int], steps: int, told: Callable[[str], None]) -> None:
    num_drawn = len(text) - 1
    if num_drawn < 1:
        return
    one.num_texts, one.prompt_tokens = one.num_texts + 1, one.prompt_tokens + len(task.token_ids)
    one.num_tokens, one.steps = one.num_tokens + num_drawn, one.steps + steps
    ngram_steps = count_steps(task.token_ids, text, WIDTHS[-1], DraftConfig().least_match)
    one.ngram_steps += ngram_steps
    told(f"{task.kind}: {len(task.token_ids)} tokens, a text of {len(text)} in {steps} steps for {ngram_steps}")


def _draft_and_verify(
    engine: Engine, profile: str, tasks: Sequence[Task], max_tokens: int
) -> list[tuple[list[int], int]]:
    """Return each text, and the steps that wrote it after its first token: each draws one more than it accepts."""
    told = _ask(engine, tasks, max_tokens, SamplingParams(temperature=0.0), f"{PROFILE}-{profile}")
    return [(one.token_ids, len(one.token_ids) - 1 - one.figures.get(ACCEPTED, 0)) for one in told]


def _agree(engine: Engine, profile: str, tasks: Sequence[Task], max_tokens: int) -> list[tuple[list[int], int]]:
    """Return the texts of the cheaper profile, and the steps that would write them with 7 of its tokens as drafts."""
    texts = [one.token_ids for one in _ask(engine, tasks, max_tokens, SamplingParams(temperature=0.0), f"by-{profile}")]
    whole = [Task(task.kind, [*task.token_ids, *text]) for task, text in zip(tasks, texts, strict=True)]
    found = []
    read = _ask(engine, whole, 1, SamplingParams(temperature=0.0, num_prompt_logprobs=1), "exactly")
    for text, one in zip(texts, read, strict=True):
        best = [choice.top[0][0] for choice in one.prompt_logprobs[-len(text) :]] if text else []
        is_right = [mine == other for mine, other in zip(best, text, strict=True)]
        found.append((text, steps_of(is_right[1:], WIDTHS[-1])))
    return found


def steps_of(is_right: Sequence[bool], width: int) -> int:
    """Return the steps that write tokens of which drafts have these right: each draws one more than it accepts."""
    at, steps = 0, 0
    while at < len(is_right):
        run = is_right[at : at + width - 1]
        at, steps = at + 1 + (run.index(False) if False in run else len(run)), steps + 1
    return steps


def _serve(
    engine: Engine, name: str, task: Task, max_tokens: int, temperature: float, profile: str = PROFILE
) -> tuple[list[int], float]:
    """Return a text, and the seconds after its first token."""
    text: list[int] = []
    began = ended = time.perf_counter()
    for delta in _told(engine, {name: task}, max_tokens, SamplingParams(temperature=temperature, seed=1), profile):
        began = began if text else time.perf_counter()
        text += delta.token_ids
        ended = time.perf_counter()
    return text, ended - began


def _ask(
    engine: Engine, tasks: Sequence[Task], max_tokens: int, sampling: SamplingParams, profile: str
) -> list[Answer]:
    """Return the answers to requests that run at once."""
    by_name = {f"{profile} {len(task.token_ids)} {place}": task for place, task in enumerate(tasks)}
    answers = {name: Answer() for name in by_name}
    for delta in _told(engine, by_name, max_tokens, sampling, profile):
        one = answers[delta.request_id]
        one.token_ids += delta.token_ids
        one.figures |= delta.figures
        one.prompt_logprobs += delta.prompt_logprobs or []
    return list(answers.values())


def _told(
    engine: Engine, tasks: dict[str, Task], max_tokens: int, sampling: SamplingParams, profile: str
) -> Iterator[Delta]:
    """Yield the deltas of requests as they come."""
    engine.submit([
        EngineRequest(
            request_id=name, prompt=pack_tokens(task.token_ids), sampling=sampling,
            max_tokens=min(max_tokens, _CONTEXT - len(task.token_ids)), stop_token_ids=(2,), attention_profile=profile,
            arrival_s=time.monotonic(),
        )
        for name, task in tasks.items()
    ])  # fmt: skip
    while engine.has_work:
        yield from engine.step()
