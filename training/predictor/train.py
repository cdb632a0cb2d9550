"""One training of a predictor from beginning to end: texts, captured attention, the fit, the file and its report.

It ties the recipe to files and the terminal. Invariant: what is held out are whole texts, and what is written is the
network of the epoch that the report names.
"""

import json
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from evals.fidelity import text_prompts
from evals.forward import load_decoder
from evals.tasks.haystack import TextSource
from gpu.predictor.network import save_network
from training.predictor.capture import Cut, Track, capture
from training.predictor.fit import Epoch, Recipe, fit
from training.progress import progress_bar
from training.reference.narrative import Narrator

HELD_OUT_SHARE = 4


@dataclass(frozen=True)
class TextPlan:
    """files: none stands for generated prose. texts: a length, of which a quarter is held out."""

    files: tuple[Path, ...]
    lengths: tuple[int, ...]
    texts: int
    targets: int
    seed: int


def narrated(seed: int) -> Iterator[str]:
    """Endless sentences of the generated prose that training has; the evaluations' text is another."""
    narrator = Narrator(seed)
    while True:
        yield narrator.sentence()


def read_prompts(model: Path, plan: TextPlan) -> dict[int, list[list[int]]]:
    """Token ids by length, after the tokenizer's first token. Raises ValueError for too little text, or OSError."""
    from transformers import AutoTokenizer

    source = TextSource(narrated, plan.files, {})
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    return {
        length: text_prompts(tokenizer, source, length, plan.texts, 1000 * plan.seed + length)
        for length in plan.lengths
    }


def split(tracks: dict[int, list[list[Track]]]) -> tuple[list[Track], list[Track]]:
    """Tracks to fit to, and those of each length's last texts, which are held out."""
    fitted: list[Track] = []
    held: list[Track] = []
    for of_texts in tracks.values():
        count = max(1, len(of_texts) // HELD_OUT_SHARE)
        fitted += [track for of_text in of_texts[:-count] for track in of_text]
        held += [track for of_text in of_texts[-count:] for track in of_text]
    return fitted, held


def train(model: Path, out: Path, plan: TextPlan, cut: Cut, recipe: Recipe, device: str) -> None:
    """Write the predictor and, beside it, a report of what made it. Progress goes to stderr."""
    begun = time.monotonic()
    on = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
    decoder = load_decoder(model, on, torch.bfloat16 if on.type == "cuda" else torch.float32)
    prompts = read_prompts(model, plan)
    tracks: dict[int, list[list[Track]]] = {}
    num_layers = decoder.architecture.num_layers
    with progress_bar(sum(map(len, prompts.values())) * num_layers, "capturing: layers") as advance:
        for length, texts in prompts.items():
            tracks[length] = [capture(decoder, prompt, cut, plan.targets, advance) for prompt in texts]
    fitted, held = split(tracks)
    some = random.Random(recipe.seed).sample(held, min(len(held), 160))
    console = Console(stderr=True)

    def show(epoch: Epoch) -> None:
        console.print(f"epoch {epoch.number + 1}/{recipe.epochs}: loss={epoch.loss:.3e} recovery={epoch.recovery:.4f}")

    with progress_bar(recipe.epochs * recipe.per_epoch, "fitting: steps") as advance:
        network, epochs = fit(fitted, some, cut, recipe, on, show, advance)
    best = best_of(epochs)
    report = {
        "model": decoder.architecture.name, "texts": [path.name for path in plan.files] or "generated prose",
        "lengths": plan.lengths, "texts_a_length": plan.texts, "targets": plan.targets, "cut": asdict(cut),
        "recipe": asdict(recipe), "tracks": len(fitted), "held_out_tracks": len(held), "best": asdict(best),
        "epochs": [asdict(epoch) for epoch in epochs], "seconds": round(time.monotonic() - begun, 1),
    }  # fmt: skip
    out.parent.mkdir(parents=True, exist_ok=True)
    facts = {"block": str(cut.block), "history": str(cut.steps), "recovery": f"{best.recovery:.4f}"}
    save_network(network, out, facts)
    out.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps({"out": str(out), "best_epoch": best.number + 1, "recovery": round(best.recovery, 4)}))


def best_of(epochs: Sequence[Epoch]) -> Epoch:
    """The first of those that recovered most."""
    return max(epochs, key=lambda epoch: epoch.recovery)
