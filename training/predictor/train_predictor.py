"""Train a predictor from texts, and write its file and report.

Invariant: whole texts are held out, and the written network is that of the epoch that the report names.
"""

import json
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from evals.fidelity import text_prompts
from evals.forward import load_decoder
from evals.samples import Sample
from evals.tasks.haystack import TextSource
from evals.tasks.reference import REFERENCE_TASKS, generate_reference
from evals.tasks.request import Request
from evals.tokenizer import load_tokenizer
from gpu.predictor.network import PredictorNetwork, save_network
from training.narrative import Narrator
from training.predictor.fit import Epoch, Network, Recipe, fit
from training.predictor.histories import Cut, Track, Tracks, capture

HELD_OUT_SHARE = 4
TEXT = "text"


@dataclass(frozen=True)
class TextPlan:
    """The texts of a training. files: empty: generated prose. tasks: in the reference model's form, each prompt with
    its answer. texts: of running text and of prompts of each task, for each length; a quarter is held out. tracks: see
    `capture`.
    """

    files: tuple[Path, ...]
    tasks: tuple[str, ...]
    lengths: tuple[int, ...]
    texts: int
    targets: int
    tracks: Tracks
    seed: int


def narrated(seed: int) -> Iterator[str]:
    """Yield endless sentences of the training's generated prose; the evaluations' text is another."""
    narrator = Narrator(seed)
    while True:
        yield narrator.sentence()


def read_prompts(model: Path, plan: TextPlan) -> dict[tuple[int, str], list[list[int]]]:
    """Return token ids by length and task (TEXT: running text, after the tokenizer's first token).

    Raises ValueError for an unknown task or too little text, or OSError.
    """
    for task in plan.tasks:
        if task not in REFERENCE_TASKS:
            raise ValueError(f"--tasks: unknown {task!r}; known: {', '.join(REFERENCE_TASKS)}")
    source = TextSource(narrated, plan.files, {})
    tokenizer = load_tokenizer(model)
    prompts = {}
    for length in plan.lengths:
        seed = 1000 * plan.seed + length
        prompts[length, TEXT] = text_prompts(tokenizer, source, length, plan.texts, seed)
        for task in plan.tasks:
            request = Request(task, "reference", tokenizer, length, seed, source, None)
            samples = [generate_reference(request, number) for number in range(plan.texts)]
            prompts[length, task] = [with_answer(tokenizer, sample) for sample in samples]
    return prompts


def with_answer(tokenizer: Any, sample: Sample) -> list[int]:
    """Return the token ids of a prompt and its answers."""
    parts = sample.prompt, " ".join(sample.answers)
    return [token for part in parts for token in tokenizer.encode(part, add_special_tokens=False)]


def split(tracks: dict[tuple[int, str], list[list[Track]]]) -> tuple[list[Track], list[Track]]:
    """Split tracks into those to fit to, and the held-out ones of the last texts of each length and task."""
    fitted: list[Track] = []
    held: list[Track] = []
    for of_texts in tracks.values():
        count = max(1, len(of_texts) // HELD_OUT_SHARE)
        fitted += [track for of_text in of_texts[:-count] for track in of_text]
        held += [track for of_text in of_texts[-count:] for track in of_text]
    return fitted, held


def train(model: Path, out: Path, plan: TextPlan, cut: Cut, recipe: Recipe, device: str) -> None:
    """Train a predictor, and write it with a report of its settings and epochs. Progress goes to stderr."""
    begun = time.monotonic()
    texts = capture_texts(model, plan, cut, recipe, device)
    network, epochs = fit_to(texts, PredictorNetwork, cut, recipe)
    best = best_of(epochs)
    report = {
        **texts.report(plan, cut, recipe), "best": asdict(best), "epochs": [asdict(epoch) for epoch in epochs],
        "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"block": str(cut.block), "history": str(cut.steps), "tracks": plan.tracks,
             "loss": recipe.loss, "recovery": f"{best.recovery:.4f}"}  # fmt: skip
    save_network(network, out, facts)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"out": str(out), "best_epoch": best.number + 1, "recovery": round(best.recovery, 4)}))


@dataclass(frozen=True)
class Texts:
    """A model's attention: tracks to fit to, held-out tracks, and some of these, by which the epoch is chosen."""

    model: str
    device: torch.device
    fitted: list[Track]
    held: list[Track]
    some: list[Track]

    def report(self, plan: TextPlan, cut: Cut, recipe: Recipe) -> dict[str, Any]:
        """Return what the network was fitted to, and how."""
        return {
            "model": self.model, "texts": [path.name for path in plan.files] or "generated prose",
            "tasks": plan.tasks, "lengths": plan.lengths, "texts_a_length": plan.texts, "targets": plan.targets,
            "tracks_of": plan.tracks, "cut": asdict(cut),
            "recipe": asdict(recipe), "tracks": len(self.fitted), "held_out_tracks": len(self.held),
        }  # fmt: skip


def capture_texts(model: Path, plan: TextPlan, cut: Cut, recipe: Recipe, device: str) -> Texts:
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    decoder = load_decoder(model, on, torch.bfloat16 if on.type == "cuda" else torch.float32)
    longest, room = max(plan.lengths), decoder.architecture.max_context_tokens
    if longest > room:
        raise ValueError(f"--lengths: {longest} tokens; {decoder.architecture.name} has {room} positions")
    prompts = read_prompts(model, plan)
    tracks: dict[tuple[int, str], list[list[Track]]] = {}
    num_layers = decoder.architecture.num_layers
    with _progress_bar(sum(map(len, prompts.values())) * num_layers, "capturing: layers") as advance:
        for key, texts in prompts.items():
            tracks[key] = [capture(decoder, prompt, cut, plan.targets, plan.tracks, advance) for prompt in texts]
    fitted, held = split(tracks)
    some = random.Random(recipe.seed).sample(held, min(len(held), 160))
    return Texts(decoder.architecture.name, on, fitted, held, some)


def fit_to(
    texts: Texts, make: Callable[[], Network], cut: Cut, recipe: Recipe
) -> tuple[Network, list[Epoch]]:  # fmt: skip
    """Return `fit`, with progress on stderr."""
    console = Console(stderr=True)

    def show(epoch: Epoch) -> None:
        console.print(f"epoch {epoch.number + 1}/{recipe.epochs}: loss={epoch.loss:.3e} recovery={epoch.recovery:.4f}")

    with _progress_bar(recipe.epochs * recipe.per_epoch, "fitting: steps") as advance:
        return fit(make, texts.fitted, texts.some, cut, recipe, texts.device, show, advance)


def best_of(epochs: Sequence[Epoch]) -> Epoch:
    """Return the first of the epochs with the best recovery."""
    return max(epochs, key=lambda epoch: epoch.recovery)


@contextmanager
def _progress_bar(total: int, what: str) -> Iterator[Callable[[], None]]:
    """Show a progress bar on stderr; yield a function to call after each unit."""
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task(what, total=total)
        yield lambda: progress.advance(task)
