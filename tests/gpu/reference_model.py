"""The reference model for tests: runners of it, prompts in its own forms, and greedy generation by plans."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gpu.config import GpuConfig, ModelConfig
from gpu.model.architecture import read_architecture
from gpu.runner import Runner
from gpu.sampling_params import SamplingParams
from gpu.step import (
    DecodeGroup,
    LogitsUnit,
    PageWrite,
    PrefillJob,
    PrefillPrompt,
    PrefillUnit,
    StepPlan,
    TokenLogprob,
    Unit,
)
from tests.gpu.poison import poison_pool
from tests.gpu.small_runner import load_small

FOLDER = Path(__file__).parents[2] / "deploy" / "models" / "reference"
NUM_LAYERS = read_architecture(FOLDER).num_layers
GREEDY = SamplingParams(temperature=0.0)
SUBJECTS = ["the captain", "the old doctor", "her sister", "a stranger", "Mr. Harding", "the boy", "the widow"]
VERBS = ["walked to", "spoke of", "remembered", "looked upon", "turned from", "thought about", "wrote of", "left"]
OBJECTS = ["the harbour", "the long road", "his father's house", "the garden", "a letter", "the church", "the river"]
ENDINGS = ["without a word", "in the evening", "before the rain", "with great care", "as if in a dream", "once more"]
KEY_WORDS = ["amber", "copper", "falcon", "harvest", "lantern", "meadow", "orchard", "timber", "velvet", "willow"]


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(FOLDER / "tokenizer.json"))


def document(num_tokens: int, draw: random.Random) -> list[str]:
    """Plain sentences of about `num_tokens` tokens."""
    sentences, length = [], 0
    while length < num_tokens:
        words = " ".join(draw.choice(part) for part in (SUBJECTS, VERBS, OBJECTS, ENDINGS))
        sentences.append(words[0].upper() + words[1:] + ".")
        length += len(tokenizer().encode(" " + sentences[-1]).ids)
    return sentences


def needle_prompt(num_tokens: int, seed: int) -> np.ndarray:
    """Token ids, int32, about `num_tokens` of them: a document with magic numbers, asked for as one or as a list."""
    draw = random.Random(seed)
    keys = [f"{draw.choice(KEY_WORDS)}-{draw.choice(KEY_WORDS)}" for _ in range(1 + 7 * (seed % 2))]
    needles = [f"The special magic number for {key} is {draw.randrange(10**6, 10**7)}." for key in keys]
    question = f"What is the special magic number for {keys[0]}?"
    if len(keys) > 1:
        question = "List every special magic number in order of appearance."
    frame = len(tokenizer().encode(" ".join(needles) + question).ids) + 8
    sentences = document(num_tokens - frame, draw)
    for needle in needles:
        sentences.insert(draw.randrange(len(sentences) + 1), needle)
    return encode(f"<|begin_of_text|><|user|>\n{' '.join(sentences)}\n\n{question}<|end|><|assistant|>\n")


def document_prompt(num_tokens: int, seed: int) -> np.ndarray:
    """Token ids, int32: a document to go on with, no question."""
    return encode("<|begin_of_text|>" + " ".join(document(num_tokens, random.Random(seed))))


def encode(text: str) -> np.ndarray:
    return np.array(tokenizer().encode(text, add_special_tokens=False).ids, dtype=np.int32)


def reference_runner(dtype: str = "float32", device: str = "cpu", max_running: int = 24, num_pages: int = 5000,
                     max_context_tokens: int = 9216, graph_batch_sizes: tuple[int, ...] = (),
                     max_hidden_tokens: int = 65_536,
                     kv: Literal["auto", "bfloat16", "fp8", "int8"] = "auto") -> Runner:  # fmt: skip
    """A runner of the reference model whose pages are NaN until written, and whose prompts' kernel is not chosen by
    times: bits follow from it.
    """
    runner = load_small(
        ModelConfig(path=FOLDER),
        GpuConfig(device=device, dtype=dtype, threads=None, graph_batch_sizes=graph_batch_sizes, kv=kv),
        max_running=max_running,
        max_context_tokens=max_context_tokens,
        chunk_tokens=2048,
        max_hidden_tokens=max_hidden_tokens,
        num_pages=num_pages,
    )
    runner.dense.choice = None
    poison_pool(runner.pool)
    return runner


@dataclass
class Pages:
    """Hands out a runner's pages, one after another, from the last to the first."""

    runner: Runner
    used: int = 0

    def take(self, slot: int, num_tokens: int, first_page: int = 0) -> PageWrite:
        count = -(-num_tokens // self.runner.limits.page_tokens) - first_page
        end = self.runner.limits.num_pages - self.used
        self.used += count
        assert end - count >= 0, "test ran out of pages"
        return PageWrite(slot, first_page, list(range(end - 1, end - count - 1, -1)))


@cache
def shallow_model(num_layers: int) -> TemporaryDirectory:
    """The first layers of the model in a folder of their own, gone at the end: for what holds layer by layer."""
    folder = TemporaryDirectory(prefix="tandem-shallow-")
    config = json.loads((FOLDER / "config.json").read_text()) | {"num_hidden_layers": num_layers}
    Path(folder.name, "config.json").write_text(json.dumps(config))
    dropped = tuple(f"model.layers.{layer}." for layer in range(num_layers, NUM_LAYERS))
    tensors = load_file(FOLDER / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    save_file(kept, Path(folder.name, "model.safetensors"))
    return folder


def layer_units(job: PrefillJob, chunk_tokens: int, num_layers: int = NUM_LAYERS) -> list[Unit]:
    """A job's units: every layer in chunks of `chunk_tokens`, then what is scored, likewise."""
    layers = [
        PrefillUnit(job.job_id, layer, begin, min(begin + chunk_tokens, job.num_tokens))
        for layer in range(num_layers)
        for begin in range(0, job.num_tokens, chunk_tokens)
    ]
    return [*layers, *logits_units(job, chunk_tokens)]


def logits_units(job: PrefillJob, chunk_tokens: int) -> list[LogitsUnit]:
    scored = job.num_scored_tokens
    return [
        LogitsUnit(job.job_id, begin, min(begin + chunk_tokens, scored)) for begin in range(0, scored, chunk_tokens)
    ]


def units_without(job: PrefillJob, units: list[Unit], slot: int) -> list[Unit]:
    """What is left of a job's last units once the slot's prompt is cut out; a unit of none to end with, if none is."""
    left: list[Unit] = []
    index = [prompt.slot for prompt in job.prompts].index(slot)
    for unit in units:
        is_scored = isinstance(unit, LogitsUnit)
        counts = [one.num_scored_tokens if is_scored else one.num_computed_tokens for one in job.prompts]
        gone = range(sum(counts[:index]), sum(counts[: index + 1]))
        begin, end = (at - len([one for one in gone if one < at]) for at in (unit.begin, unit.end))
        if begin < end:
            left.append(replace(unit, begin=begin, end=end))
    if left:
        return left
    num_scored = job.num_scored_tokens - job.prompts[index].num_scored_tokens
    return [LogitsUnit(job.job_id, num_scored, num_scored)]


@dataclass
class Generated:
    """Output tokens and prompt logprobs of each prompt, in order."""

    tokens: list[list[int]]
    prompt_logprobs: dict[int, list[TokenLogprob]]


def prefill_prompts(prompts: list[np.ndarray], sampling: SamplingParams = GREEDY) -> list[PrefillPrompt]:
    """One a slot, from slot 0 on."""
    return [PrefillPrompt(slot, ids, 0, len(ids), sampling, "exact") for slot, ids in enumerate(prompts)]


def prefill_plans(
    runner: Runner, prompts: list[PrefillPrompt], num_tokens: int, chunk_tokens: int = 512
) -> Iterator[StepPlan]:
    """Each prompt as its own job, with pages for so many tokens more."""
    pages = Pages(runner)
    for prompt in prompts:
        job = PrefillJob(prompt.slot, [prompt])
        writes = [pages.take(prompt.slot, len(prompt.token_ids) + num_tokens)]
        yield StepPlan(page_writes=writes, new_jobs=[job], units=layer_units(job, chunk_tokens))


def generate(runner: Runner, prompts: list[np.ndarray], num_tokens: int, sampling: SamplingParams = GREEDY,
             chunk_tokens: int = 2048) -> Generated:  # fmt: skip
    """Prefill each prompt as its own job, then decode all of them as one batch."""
    generated = Generated([], {})
    for plan in prefill_plans(runner, prefill_prompts(prompts, sampling), num_tokens, chunk_tokens):
        result = runner.launch(plan).collect()
        generated.tokens.append([result.tokens[0].token_id])
        generated.prompt_logprobs.update(result.prompt_logprobs)
    decode(runner, generated, [len(ids) for ids in prompts], num_tokens)
    runner.launch(StepPlan(released_slots=list(range(len(prompts))))).collect()
    return generated


def decode(runner: Runner, generated: Generated, prompt_lengths: list[int], num_tokens: int) -> None:
    """Decode slots 0 .. as one batch until each has `num_tokens` tokens."""
    slots = list(range(len(prompt_lengths)))
    for drawn in range(1, num_tokens):
        group = DecodeGroup(slots, [length + drawn - 1 for length in prompt_lengths], [drawn] * len(slots))
        for token in runner.launch(StepPlan(decode=[group])).collect().tokens:
            generated.tokens[token.slot].append(token.token_id)
