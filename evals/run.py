"""Run tasks under attention methods in the reference decoder, and make a record of each sample.

Invariants: all decode methods of a cell see the same prompts and share one prefill of each. A sample that fails becomes
a record with its error and score 0. A sample that the store already has is not run again.
"""

from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from multiprocessing import get_context
from pathlib import Path
from signal import SIG_IGN, SIGINT, signal
from typing import Any

import numpy as np
import torch

from evals import metrics
from evals.cells import Cell, PromptSettings
from evals.datasets import read_own, shorten
from evals.decode import Decoded, PrefilledBatch, decode_forced, decode_greedy, prefill_batch
from evals.distributions import TokenSums
from evals.forward import ReferenceDecoder
from evals.methods.attention_method import MethodError
from evals.methods.baselines import parse_method
from evals.methods.full import Full
from evals.samples import Sample
from evals.score_rows import APPLIED, KL
from evals.store import Ledger, Record, sample_key
from evals.tasks import CODE_VERSION, TASKS
from evals.tasks.fitting import count_chat_tokens
from evals.tasks.reference import SPECIAL_TOKENS_OF_FORM, user_turn
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer
from gpu.model.vocabulary import read_vocabulary
from gpu.weights.weights_digest import digest_weights, kept_path

AGREEMENT = "agreement"
"""Metric of forced cells: the share of full attention's own answer tokens that the method would have chosen too."""

SPECIAL_TOKENS = 2
"""Room in a completion for the special tokens that a tokenizer puts around a text."""


@dataclass(frozen=True)
class Prompt:
    sample: Sample
    token_ids: np.ndarray


def name_weights(model: Path) -> str:
    """Return the name under which a model's records are stored: a digest of its weights.

    A folder's name may stay the same while the weights change, and variants of a model may have the same name.
    """
    return digest_weights(model, kept_path())


def form_of(model: Path) -> str:
    """Return the wording of prompts for a model: `reference` if its vocabulary has that form's special tokens, else
    `ruler`, in the model's own chat template.
    """
    vocabulary, _ = read_vocabulary(model)
    has_all = all(vocabulary.token_to_id(token) is not None for token in SPECIAL_TOKENS_OF_FORM)
    return "reference" if has_all else "ruler"


def make_prompts(cell: Cell, settings: PromptSettings) -> list[Prompt]:
    """Return the prompts of a cell, tokenized. With several cells this runs in worker processes.

    A dataset's prompts are shortened to the cell's length. There are fewer than asked for if its file has fewer.
    """
    tokenizer = load_tokenizer(settings.model)
    files = dict(settings.datasets)
    if cell.task in files:
        as_chat = is_chat(settings.sent_as, False, tokenizer)
        room = cell.length_tokens - (count_chat_tokens(tokenizer) if as_chat else SPECIAL_TOKENS)
        rows = read_own(cell.task, files[cell.task], cell.num_samples, settings.seed)
        samples = [shorten(sample, tokenizer, room) for sample in rows]
    else:
        source = text_source(settings.text_files, dict(settings.question_files))
        make = TASKS[cell.task]
        samples = make(tokenizer, cell.length_tokens, cell.num_samples, settings.seed, settings.form, source)
    return [Prompt(sample, encode(sample, tokenizer, settings.sent_as)) for sample in samples]


def is_chat(sent_as: str, is_raw: bool, tokenizer: Any) -> bool:
    """Return whether a prompt goes as a chat turn."""
    return sent_as == "chat" or (sent_as == "auto" and not is_raw and bool(getattr(tokenizer, "chat_template", None)))


def encode(sample: Sample, tokenizer: Any, sent_as: str) -> np.ndarray:
    """Return the token ids of a prompt, int32: as a completion, or as the user's turn of the chat template."""
    text, adds_special = sent_text(sample, tokenizer, sent_as)
    return np.asarray(tokenizer.encode(text, add_special_tokens=adds_special), dtype=np.int32)


def sent_text(sample: Sample, tokenizer: Any, sent_as: str) -> tuple[str, bool]:
    """Return the whole text of a prompt as it is sent, and whether the tokenizer adds its special tokens to it."""
    is_raw = bool(sample.meta.get("raw"))
    if not is_chat(sent_as, is_raw, tokenizer):
        return sample.prompt, not is_raw
    prefix = sample.meta.get("answer_prefix", "")
    content = user_turn(sample.prompt) if is_raw else sample.prompt.removesuffix(prefix)
    turns = [{"role": "user", "content": content}]
    return tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False) + prefix.lstrip(), False


def prompts_of(
    cells: Sequence[Cell], settings: PromptSettings, workers: int
) -> Generator[tuple[Cell, list[Prompt]], None, None]:
    """Yield each cell with its prompts.

    workers: processes that make them ahead of time; 0: they are made in this process when they are asked for.
    """
    if not workers:
        for cell in cells:
            yield cell, make_prompts(cell, settings)
        return
    ignore_interrupts = partial(signal, SIGINT, SIG_IGN)  # a terminal interrupts all of them; this process decides
    pool = ProcessPoolExecutor(min(workers, len(cells)), get_context("spawn"), ignore_interrupts)
    try:
        pending = [pool.submit(make_prompts, cell, settings) for cell in cells]
        for cell, future in zip(cells, pending, strict=True):
            yield cell, future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def run_cells(
    decoder: ReferenceDecoder,
    tokenizer: Any,
    prompts: Iterable[tuple[Cell, list[Prompt]]],
    settings: PromptSettings,
    batch_tokens: int,
    ledger: Ledger,
) -> None:
    """Run the samples that the ledger does not have yet.

    batch_tokens: the most tokens of prompts in one batch, which has at least one prompt.
    """
    model = name_weights(settings.model)
    for cell, made in prompts:
        keys = _Keys(cell, settings, model)
        wanted = {prompt.sample.sample_id: [keys.of(label, prompt.sample) for label in cell.methods] for prompt in made}
        for key in chain.from_iterable(wanted.values()):
            if key in ledger.done:
                ledger.found(key)
        missing = [prompt for prompt in made if any(key not in ledger.done for key in wanted[prompt.sample.sample_id])]
        size = max(1, batch_tokens // cell.length_tokens)
        for begin in range(0, len(missing), size):
            ledger.check()
            for record in run_batch(decoder, tokenizer, cell, missing[begin : begin + size], keys):
                if record.key not in ledger.done:
                    ledger.keep(record)
        ledger.finished(cell)


@dataclass(frozen=True)
class _Keys:
    """The keys and identities of a cell's records. `known` caches keys, since each one hashes a whole prompt."""

    cell: Cell
    prompts: PromptSettings
    model: str
    known: dict[tuple[str, str], str] = field(default_factory=dict)

    def of(self, label: str, sample: Sample) -> str:
        place = (label, sample.sample_id)
        if place not in self.known:
            self.known[place] = self._make(label, sample)
        return self.known[place]

    def _make(self, label: str, sample: Sample) -> str:
        settings = {**parse_method(label).settings, "forced_tokens": self.cell.forced_tokens}
        return sample_key(label, settings, sample, self.cell.length_tokens, self.prompts, self.model, CODE_VERSION)

    def record(
        self, label: str, sample: Sample, text: str, score: float, measured: dict[str, float], failure: str | None
    ) -> Record:
        identity = {
            "method": label,
            "settings": parse_method(label).settings,
            "task": self.cell.task,
            "length": self.cell.length_tokens,
            "metric": AGREEMENT if self.cell.forced_tokens else sample.metric,
            "text": self.prompts.text,
            "seed": self.prompts.seed,
        }
        key = self.of(label, sample)
        return Record(key, identity, sample.sample_id, score, text, failure, sample.depth, measured)


def run_batch(
    decoder: ReferenceDecoder, tokenizer: Any, cell: Cell, prompts: Sequence[Prompt], keys: _Keys
) -> Iterator[Record]:
    """Yield the records of a batch under every method of the cell.

    A batch that does not fit in memory is halved, prompts first. A batch that fails otherwise is tried method by
    method, then prompt by prompt. A prompt that fails alone under one method is recorded as a failure. The loss of the
    device is raised.
    """
    try:
        yield from list(_run_together(decoder, tokenizer, cell, prompts, keys))
        return
    except torch.AcceleratorError:
        raise
    except (RuntimeError, MethodError) as error:
        reason = f"{type(error).__name__}: {error}"
        crowded = isinstance(error, (torch.OutOfMemoryError, MethodError))
    torch.cuda.empty_cache()
    if len(prompts) > 1 and (crowded or len(cell.methods) == 1):
        middle = len(prompts) // 2
        yield from run_batch(decoder, tokenizer, cell, prompts[:middle], keys)
        yield from run_batch(decoder, tokenizer, cell, prompts[middle:], keys)
    elif len(cell.methods) > 1:
        for label in cell.methods:
            yield from run_batch(decoder, tokenizer, replace(cell, methods=(label,)), prompts, keys)
    else:
        yield keys.record(cell.methods[0], prompts[0].sample, "", 0.0, {}, reason)


def _run_together(
    decoder: ReferenceDecoder, tokenizer: Any, cell: Cell, prompts: Sequence[Prompt], keys: _Keys
) -> Iterator[Record]:
    methods = [parse_method(label) for label in cell.methods]
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    room = decoder.architecture.max_context_tokens - max(map(len, ids))
    longest_answer = max(prompt.sample.max_new_tokens for prompt in prompts)
    tokens = min(cell.forced_tokens or longest_answer, room)
    batch = prefill_batch(decoder, ids, tokens, [*methods, Full()])
    fed = _fed(batch, len(methods), tokens) if cell.forced_tokens else None
    for which, label in enumerate(cell.methods):
        decoded, sums = _decode(batch, which, tokens, fed)
        yield from _score(tokenizer, keys, label, prompts, decoded, fed, sums)


@dataclass(frozen=True)
class _Fed:
    """Full attention's answers, which are fed to every method, and its log probabilities at each of their tokens:
    float32 `[requests, vocab]` for each step.
    """

    answers: list[list[int]]
    logprobs: list[torch.Tensor]

    def sums(self, device: torch.device) -> TokenSums:
        steps = len(self.logprobs)
        rows = [row + [-1] * (steps - len(row)) for row in self.answers]
        return TokenSums(self.logprobs, torch.tensor(rows, device=device))


def _fed(batch: PrefilledBatch, full: int, tokens: int) -> _Fed:
    """Decode full attention's answers. An empty answer is replaced by its stop token."""
    stop = batch.decoder.architecture.eos_token_ids
    answers = [row or [stop[0]] for row in decode_greedy(batch, full, tokens, frozenset(stop), None).tokens]
    logprobs: list[torch.Tensor] = []
    decode_forced(batch, full, answers, None, lambda _, logits: logprobs.append(logits.log_softmax(-1)))
    return _Fed(answers, logprobs)


def _decode(batch: PrefilledBatch, which: int, tokens: int, fed: _Fed | None) -> tuple[Decoded, TokenSums | None]:
    if fed is not None:
        sums = fed.sums(batch.decoder.device)
        return decode_forced(batch, which, fed.answers, None, sums), sums
    return decode_greedy(batch, which, tokens, frozenset(batch.decoder.architecture.eos_token_ids), None), None


def _score(
    tokenizer: Any,
    keys: _Keys,
    label: str,
    prompts: Sequence[Prompt],
    decoded: Decoded,
    fed: _Fed | None,
    sums: TokenSums | None,
) -> Iterator[Record]:
    divergences = sums.divergences() if sums is not None else [None] * len(prompts)
    for row, (prompt, tokens, read, kl) in enumerate(
        zip(prompts, decoded.tokens, decoded.reads, divergences, strict=True)
    ):
        sample = prompt.sample
        text = tokenizer.decode(tokens[: sample.max_new_tokens], skip_special_tokens=True)
        measured = read.to_json() | {APPLIED: float(read.spares)} | ({KL: kl} if kl is not None else {})
        if fed is not None:
            wanted = fed.answers[row]
            value = sum(one == other for one, other in zip(tokens, wanted, strict=True)) / len(wanted)
        else:
            value = metrics.score(sample.metric, text, sample.answers, sample.meta)
        yield keys.record(label, sample, text, value, measured, None)
