"""Run `python -m lab networks`: fit predictors of other kinds, as AttentionPredictor's Table 4 compares them."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from training.cli import HISTORY, SERVED, SINK, one_line_errors, parse_lengths

if TYPE_CHECKING:
    from training.predictor.capture import Cut
    from training.predictor.fit import Recipe
    from training.predictor.train import TextPlan


def networks(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder of the model, or GGUF file")],
    out: Annotated[Path, typer.Option("--out", help="the JSON to write")],
    text: Annotated[list[Path], typer.Option("--text", help="UTF-8 text, repeatable; default: generated prose")] = [],  # noqa: B006
    tasks: Annotated[str, typer.Option("--tasks", help="of the reference model's own, commas between: prompts with "
                                       "their answers, beside the text")] = "",
    lengths: Annotated[str, typer.Option("--lengths", help="tokens of a text, commas between")] = "2048,4096,8192",
    texts: Annotated[int, typer.Option("--texts", min=2, help="a length, and prompts of each task; the last quarter "
                                       "is held out")] = 8,
    targets: Annotated[int, typer.Option("--targets", min=1, help="steps of a text that are predicted")] = 64,
    tracks: Annotated[Literal["group", "head"], typer.Option("--tracks", help="group: a KV head's query heads as one, "
                      "as it serves; head: each query head, as in the paper")] = "group",
    history: Annotated[int, typer.Option("--history", min=5, help="steps (the paper's H: 64)")] = HISTORY,
    sink: Annotated[int, typer.Option("--sink", min=0, help="first tokens, which are cut off")] = SINK,
    block: Annotated[int, typer.Option("--block", min=1, help="tokens (the paper's b)")] = 16,
    loss: Annotated[Literal["maxima", "mass"], typer.Option("--loss", help="squared error of block maxima, as in the "
                    "paper; or cross entropy of blocks' attention")] = "maxima",
    epochs: Annotated[int, typer.Option("--epochs", min=1)] = 30,
    per_epoch: Annotated[int, typer.Option("--per-epoch", min=1, help="steps of an epoch")] = 100,
    batch: Annotated[int, typer.Option("--batch", min=1, help="pairs of a step")] = 64,
    learning_rate: Annotated[float, typer.Option("--lr", min=0)] = 3e-3,
    budget: Annotated[int, typer.Option("--budget", min=16, help="tokens between sink and recent ones that the best "
                                        "epoch is chosen by")] = 512,
    seed: Annotated[int, typer.Option("--seed")] = 0,
    device: Annotated[str, typer.Option("--device", help="auto, cpu, cuda or cuda:N")] = "auto",
    names: Annotated[str, typer.Option("--kinds", help="of CNN, MLP, CNN-block, LSTM-block, commas between")] =
        "CNN,MLP,CNN-block,LSTM-block",
) -> None:  # fmt: skip
    """Fit networks of several kinds to the same captured attention, and write what each recovers."""
    with one_line_errors():
        from training.predictor.capture import Cut
        from training.predictor.fit import Recipe
        from training.predictor.train import TextPlan

        named = tuple(name.strip() for name in tasks.split(",") if name.strip())
        plan = TextPlan(tuple(text), named, parse_lengths(lengths), texts, targets, tracks, seed)
        recipe = Recipe(loss, epochs, batch, per_epoch, learning_rate, max(1, budget // block), seed)
        cut = Cut(block, sink, SERVED["local_tokens"], history, SERVED["exempt_layers"])
        compare(model, out, plan, cut, recipe, device, names.split(","))


def compare(
    model: Path, out: Path, plan: "TextPlan", cut: "Cut", recipe: "Recipe", device: str, names: Sequence[str]
) -> None:
    """Fit networks of other kinds alike and write what each recovers.

    Raises ValueError for an unknown kind.
    """
    from lab.quality.networks import kinds, num_parameters
    from training.predictor.train import best_of, capture_texts, fit_to

    known = kinds(cut.steps)
    for name in names:
        if name not in known:
            raise ValueError(f"--kinds: unknown {name!r}; known: {', '.join(known)}")
    texts = capture_texts(model, plan, cut, recipe, device)
    rows: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    for name in names:
        begun = time.monotonic()
        network, epochs = fit_to(texts, known[name], cut, recipe)
        best = best_of(epochs)
        rows.append({"kind": name, "parameters": num_parameters(network), "recovery": best.recovery,
                     "best_epoch": best.number + 1, "seconds": round(time.monotonic() - begun, 1)})  # fmt: skip
        print(json.dumps(rows[-1]), flush=True)
        report = {**texts.report(plan, cut, recipe), "kinds": rows}
        out.write_text(json.dumps(report, indent=1) + "\n")
