"""A run's work in parts, each for one process: profiles of a window in an engine, methods in the decoder, errors.

Invariant: a part's records are kept in a folder of its own as they are made, so a run that was cut goes on where it
stopped; parts share no state, so they may run at the same time.
"""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch

from evals.cells import Cell, PromptSettings
from evals.fidelity import text_prompts
from evals.forward import ReferenceDecoder, load_decoder
from evals.report.document import write_document
from evals.run import Prompt, run_cells
from evals.score_rows import Row
from evals.served import run_profiles
from evals.served_method import PREFIX
from evals.serving import load_serving_engine, make_deployment
from evals.session import open_ledger, progress_bar
from evals.stopping import RunCut, Stop, stopping
from evals.store import Ledger, Record
from evals.tasks.text import text_source
from evals.tokenizer import load_tokenizer
from evals.tuning.mac_method import Mac
from gpu.model.architecture import read_architecture
from lab.mac.forced import run_forced
from lab.mac.grid import Setting
from lab.mac.reuse_errors import BANDS, measure_errors
from server.deployment import Deployment
from transfer.host_config import HostConfig

LABELS_A_PART = 10
"""Methods of the decoder that go together: each prefill is theirs together, and all of them decode one by one."""

ERRORS_FILE = "errors.json"
ERRORS_SEED = 1
Prompts = Mapping[tuple[str, int], list[Prompt]]
"""By task and length."""


@dataclass(frozen=True)
class Asked:
    """The settings of a run. tasks: answered freely, by methods and by profiles; long: by profiles alone, while methods
    are fed the right answers, `most` tokens of each. samples, forced_samples, served_samples: prompts a task and length
    of methods with free and with fed answers, and of profiles.

    beside: other methods. error_steps: tokens of `error_texts` texts at each length that figure 4 is made of,
    0: none. batch: prompts of the longest length that go together in the decoder.
    """

    prompts: PromptSettings
    device: str
    settings: tuple[Setting, ...]
    beside: tuple[str, ...]
    lengths: tuple[int, ...]
    tasks: tuple[str, ...]
    long: tuple[str, ...]
    most: int
    samples: int
    forced_samples: int
    served_samples: int
    error_texts: int
    error_steps: int
    batch: int


@dataclass(frozen=True)
class Part:
    """One part of a run. cells: answered freely; forced: whose right answers are fed. settings: of a part that serves,
    what its engine has; threads: of it that read host memory.
    """

    name: str
    kind: Literal["served", "decoder", "errors"]
    cells: tuple[Cell, ...] = ()
    forced: tuple[Cell, ...] = ()
    settings: tuple[Setting, ...] = ()
    threads: int = 1

    @property
    def labels(self) -> set[str]:
        """Of the methods that it runs."""
        return {label for cell in (*self.cells, *self.forced) for label in cell.methods}


@dataclass(frozen=True)
class Done:
    """The results of a part. errors: rows of figure 4. reason: why it was cut, failure: why it could not go on, or
    None.
    """

    name: str
    records: list[Record] = field(default_factory=list)
    errors: list[Row] = field(default_factory=list)
    reason: str | None = None
    failure: str | None = None


def parts_of(asked: Asked) -> list[Part]:
    """Return the parts, those that take longest first."""
    parts = []
    overs = dict.fromkeys(one.over for one in reversed(asked.settings))  # sampled ones wait for the CPU
    for over in overs if asked.served_samples else ():
        windows = dict.fromkeys(one.window for one in asked.settings if one.over == over)
        for place, window in enumerate(windows):
            own = tuple(one for one in asked.settings if (one.over, one.window) == (over, window))
            labels = [one.served for one in own] + ([PREFIX + over] if place == 0 else [])
            cells = tuple(_cells(asked, (*asked.tasks, *asked.long), asked.served_samples, labels, 0))
            threads = max(1, (os.cpu_count() or 1) // (2 * len(windows)))  # beside those of other parts
            parts.append(Part(f"served-{over}-{window[0]}-{window[1]}", "served", cells, (), own, threads))
    for place, labels in enumerate(_decoded(asked)):
        own = [*(["full"] if place == 0 else []), *labels]  # full attention once, for all
        free = _cells(asked, asked.tasks, asked.samples, own, 0)
        forced = _cells(asked, asked.long, asked.forced_samples, own, asked.most)
        parts.append(Part(f"decoder-{place}", "decoder", tuple(free), tuple(forced)))
    if asked.error_steps:
        parts.append(Part("errors", "errors"))
    return parts


def _decoded(asked: Asked) -> list[list[str]]:
    """Return methods of the decoder, in groups."""
    others = [*(one.method for one in asked.settings if one.over == "exact"), *asked.beside]
    return [others[begin : begin + LABELS_A_PART] for begin in range(0, len(others), LABELS_A_PART)]


def _cells(asked: Asked, tasks: Sequence[str], samples: int, labels: Sequence[str], most: int) -> Iterator[Cell]:
    for length in sorted(asked.lengths, reverse=True) if samples else ():
        for task in tasks:
            yield Cell(task, length, samples, tuple(labels), most)


def run_part(part: Part, asked: Asked, prompts: Prompts, folder: Path, seconds: float | None) -> Done:
    """Run what is not in `folder` yet."""
    with stopping(seconds) as stop:
        if part.kind == "errors":
            return _run_errors(part, asked, folder / part.name, stop)
        kept = [*part.cells, *part.forced, *part.forced]  # forced ones leave two records each
        with open_ledger(kept, len(part.cells) + len(part.forced), folder / part.name, None, stop) as (ledger, records):
            if part.kind == "served":
                _run_served(part, asked, prompts, ledger)
            else:
                _run_decoder(part, asked, prompts, ledger)
        return Done(part.name, list(records.values()), reason=stop.reason)


def _take(cells: Sequence[Cell], prompts: Prompts) -> Iterator[tuple[Cell, list[Prompt]]]:
    for cell in cells:
        yield cell, prompts[cell.task, cell.length_tokens][: cell.num_samples]


def _run_served(part: Part, asked: Asked, prompts: Prompts, ledger: Ledger) -> None:
    model, longest = asked.prompts.model, max(asked.lengths)
    profiles = {label: label.removeprefix(PREFIX) for label in part.cells[0].methods}
    deployment = deployment_of(part.settings, model, asked.device, longest, part.threads)
    with load_serving_engine(model, asked.device, longest, deployment) as engine:
        shape, cells = read_architecture(model), _take(part.cells, prompts)
        run_profiles(engine, load_tokenizer(model), shape, cells, profiles, asked.prompts, ledger, None)


def deployment_of(settings: Sequence[Setting], model: Path, device: str, longest: int, threads: int) -> Deployment:
    """One engine for settings over the same placement, under which nothing is resident; a ring for each prompt."""
    host = None
    if settings[0].over != "exact":
        host = HostConfig(resident_tokens=0, residency="fixed", threads=threads)
    made = make_deployment(model, device, longest, host)
    rings = made.scheduler.max_running
    return made.model_copy(update={"profiles": {one.profile: one.composition(rings) for one in settings}})


def _run_decoder(part: Part, asked: Asked, prompts: Prompts, ledger: Ledger) -> None:
    decoder, tokenizer = _load(asked), load_tokenizer(asked.prompts.model)
    tokens = asked.batch * max(asked.lengths)
    run_cells(decoder, tokenizer, _take(part.cells, prompts), asked.prompts, tokens, ledger)
    run_forced(decoder, tokenizer, _take(part.forced, prompts), asked.prompts, tokens, ledger)


def _run_errors(part: Part, asked: Asked, folder: Path, stop: Stop) -> Done:
    """Figure 4, of the loosest threshold and the largest window; made whole or not at all."""
    path = folder / ERRORS_FILE
    if path.exists():
        return Done(part.name, errors=json.loads(path.read_text())["errors"])
    decoder, tokenizer = _load(asked), load_tokenizer(asked.prompts.model)
    tau, capacity = min(one.tau for one in asked.settings), max(one.capacity for one in asked.settings)
    share = max(one.share for one in asked.settings)
    rows: list[Row] = []
    with progress_bar(len(asked.lengths) * asked.error_steps, "figure 4, steps") as advance:

        def go_on() -> None:
            advance()
            stop.check()

        try:
            for length in asked.lengths:
                bands = [band for band in BANDS if band + capacity < length]
                source = text_source(asked.prompts.text_files, {})
                texts = text_prompts(tokenizer, source, length, asked.error_texts, asked.prompts.seed + ERRORS_SEED)
                methods = [Mac(tau=tau, max_prefix_share=share, capacity=capacity, band=band) for band in bands]
                found = measure_errors(decoder, texts, asked.error_steps, methods, go_on)
                rows += [{"length": length, "tau": tau, "capacity": capacity, **row} for row in found]
        except RunCut as cut:
            return Done(part.name, reason=str(cut))
    write_document(path, {"errors": rows})
    return Done(part.name, errors=rows)


def _load(asked: Asked) -> ReferenceDecoder:
    on_cuda = asked.device.startswith("cuda")
    return load_decoder(asked.prompts.model, torch.device(asked.device), torch.bfloat16 if on_cuda else torch.float32)
