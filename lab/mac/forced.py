"""Right answers fed to methods, token by token: how often they would have said the next one, and full attention's.

All methods are fed the same tokens in the reference decoder, over one prefill, so an early mistake does not spoil what
follows. Invariant: each prompt gives two records a method, both over the same positions: the share of right tokens, and
the share of full attention's choices.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from evals.cells import Cell, PromptSettings
from evals.decode import decode_forced, prefill_batch
from evals.forward import ReferenceDecoder
from evals.meter import Fractions
from evals.methods.full import Full
from evals.methods.method import DecodeMethod
from evals.run import AGREEMENT, Prompt, name_weights
from evals.samples import Sample
from evals.store import Ledger, Record, sample_key
from evals.tasks import CODE_VERSION
from lab.methods import parse_method

TOKEN_ACCURACY = "token_accuracy"
FORCED_METRICS = (TOKEN_ACCURACY, AGREEMENT)


def run_forced(
    decoder: ReferenceDecoder,
    tokenizer: Any,
    prompts: Iterable[tuple[Cell, list[Prompt]]],
    settings: PromptSettings,
    batch_tokens: int,
    ledger: Ledger,
) -> None:
    """Run what the ledger does not hold yet. A cell's forced_tokens: of an answer, at most; its methods decode.

    batch_tokens: prompts that go together have at most so many tokens (one prompt always goes).
    """
    model = name_weights(settings.model)
    for cell, made in prompts:
        keys = {prompt.sample.sample_id: _keys(cell, prompt.sample, settings, model) for prompt in made}
        for key in (key for known in keys.values() for key in known.values() if key in ledger.done):
            ledger.found(key)
        missing = [one for one in made if any(key not in ledger.done for key in keys[one.sample.sample_id].values())]
        size = max(1, batch_tokens // cell.length_tokens)
        for begin in range(0, len(missing), size):
            ledger.check()
            for record in _run_batch(decoder, tokenizer, cell, missing[begin : begin + size], keys, settings):
                if record.key not in ledger.done:
                    ledger.keep(record)
        ledger.finished(cell)


_Keys = dict[tuple[str, str], str]
"""Of one prompt's records, by method and metric."""


def _keys(cell: Cell, sample: Sample, settings: PromptSettings, model: str) -> _Keys:
    return {
        (label, metric): sample_key(
            label, {**parse_method(label).settings, "right_tokens": cell.forced_tokens, "metric": metric}, sample,
            cell.length_tokens, settings, model, CODE_VERSION,
        )
        for label in cell.methods
        for metric in FORCED_METRICS
    }  # fmt: skip


def _run_batch(
    decoder: ReferenceDecoder, tokenizer: Any, cell: Cell, prompts: Sequence[Prompt], keys: dict[str, _Keys],
    settings: PromptSettings,
) -> list[Record]:  # fmt: skip
    """Return what does not fit in memory is halved, down to one prompt, which raises."""
    try:
        return list(_compare(decoder, tokenizer, cell, prompts, keys, settings))
    except torch.OutOfMemoryError:
        if len(prompts) == 1:
            raise
    torch.cuda.empty_cache()
    middle = len(prompts) // 2
    return [
        *_run_batch(decoder, tokenizer, cell, prompts[:middle], keys, settings),
        *_run_batch(decoder, tokenizer, cell, prompts[middle:], keys, settings),
    ]


def _compare(
    decoder: ReferenceDecoder, tokenizer: Any, cell: Cell, prompts: Sequence[Prompt], keys: dict[str, _Keys],
    settings: PromptSettings,
) -> Iterable[Record]:  # fmt: skip
    methods = [parse_method(label) for label in cell.methods]
    assert all(isinstance(method, DecodeMethod) for method in methods), "forced answers are decoded"
    right = [answer_tokens(tokenizer, prompt.sample)[: cell.forced_tokens] for prompt in prompts]
    ids = [prompt.token_ids.tolist() for prompt in prompts]
    decoding = [method for method in methods if isinstance(method, DecodeMethod)]
    batch = prefill_batch(decoder, ids, max(map(len, right)), [*decoding, Full()])
    exact = decode_forced(batch, len(decoding), right, None, None).tokens
    for which, label in enumerate(cell.methods):
        said = decode_forced(batch, which, right, None, None)
        for row, prompt in enumerate(prompts):
            for metric, wanted in zip(FORCED_METRICS, (right[row], exact[row]), strict=True):
                key = keys[prompt.sample.sample_id][label, metric]
                value = share_alike(said.tokens[row], wanted)
                yield _record(key, label, metric, cell, prompt.sample, settings, value, said.reads[row])


def answer_tokens(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the first of the right answers, as the assistant's turn has it."""
    return list(tokenizer.encode(sample.answers[0], add_special_tokens=False))


def share_alike(said: Sequence[int], wanted: Sequence[int]) -> float:
    return sum(one == other for one, other in zip(said, wanted, strict=True)) / len(wanted)


def _record(
    key: str, label: str, metric: str, cell: Cell, sample: Sample, settings: PromptSettings, value: float,
    reads: Fractions,
) -> Record:  # fmt: skip
    identity = {
        "method": label,
        "settings": parse_method(label).settings,
        "task": cell.task,
        "length": cell.length_tokens,
        "metric": metric,
        "text": settings.text,
        "seed": settings.seed,
    }
    return Record(key, identity, sample.sample_id, value, "", None, sample.depth, reads.to_json())
