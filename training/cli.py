"""Name the commands of `tandem train`. Each imports what it runs only when it runs, so that listing them is quick."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from gpu.methods.predicted.settings import SERVED

HISTORY, SINK = SERVED["history"], SERVED["sink_tokens"]
app = typer.Typer(no_args_is_help=True, help="Train what a method needs on your own model.")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Report expected errors in one line on stderr, and exit with status 1."""
    from gpu.model.architecture import ModelError

    try:
        yield
    except (ModelError, OSError, ValueError) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise typer.Exit(1) from None


def parse_lengths(text: str) -> tuple[int, ...]:
    """Parse `2048,4096` to (2048, 4096). Raises ValueError."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--lengths: got {text!r}; wanted tokens with commas between, such as 2048,4096")
    return tuple(int(part) for part in parts)


@app.callback()
def group() -> None:
    """Train what a method needs on your own model."""


@app.command()
def predictor(
    model: Annotated[Path, typer.Option("--model", help="Hugging Face folder of the model, or GGUF file")],
    out: Annotated[Path, typer.Option("--out", help="the .safetensors to write; a report goes beside it (.json)")],
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
) -> None:  # fmt: skip
    """Train a predictor of the blocks that a model's heads attend to next.

    Captures full attention over texts, fits the network to it, and keeps the epoch that recovers most attention on
    held-out texts.
    """
    with one_line_errors():
        from training.predictor.fit import Recipe
        from training.predictor.histories import Cut
        from training.predictor.train_predictor import TextPlan, train

        if out.suffix != ".safetensors":
            raise ValueError(f"--out: {out}; wanted a name that ends in .safetensors")
        named = tuple(name.strip() for name in tasks.split(",") if name.strip())
        plan = TextPlan(tuple(text), named, parse_lengths(lengths), texts, targets, tracks, seed)
        recipe = Recipe(loss, epochs, batch, per_epoch, learning_rate, max(1, budget // block), seed)
        cut = Cut(block, sink, SERVED["local_tokens"], history, SERVED["exempt_layers"])
        train(model, out, plan, cut, recipe, device)
