"""Run `python -m lab drafts`: measure accepted drafts, and print the tables of docs/methods/drafts.md."""

import time
from pathlib import Path
from typing import Annotated, Literal

import typer


def drafts(
    model: Annotated[Path, typer.Option(help="a folder or a GGUF file, on the CPU")] = Path(
        "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    each: Annotated[int, typer.Option(min=1, help="prompts of each kind")] = 10,
    tokens: Annotated[int, typer.Option(min=2, help="of a text, at most")] = 400,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    profiles: Annotated[str, typer.Option(help="that draft over host memory, greedy: indexed,sampled")] = "",
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="of drafts by profiles")] = "cpu",
    streams: Annotated[int, typer.Option(min=1, help="beside one another, of drafts by profiles")] = 1,
) -> None:
    """Measure how many tokens of n-gram or profiles' drafts a model accepts, and the time that n-grams save."""
    from lab.speed.accepted_drafts import WIDTHS, Run, measure_accepted, measure_by_profiles

    if profiles:
        began, names = time.monotonic(), profiles.split(",")
        found = measure_by_profiles(
            model, names, each, tokens, Run(device, threads, streams),
            lambda line: typer.echo(f"{time.monotonic() - began:.0f} s: {line}", err=True),
        )  # fmt: skip
        print("| prompts | tokens each | tokens of texts | drafted by | tokens a step of 8 rows | by n-grams |")
        print("|---|---|---|---|---|---|")
        for name, of_kinds in found.items():
            for kind, own in of_kinds.items():
                if own.num_texts:
                    lengths = " | ".join(f"{own.num_tokens / steps:.2f}" for steps in (own.steps, own.ngram_steps))
                    mean = own.prompt_tokens // own.num_texts
                    print(f"| {own.num_texts} {kind} | {mean:,} | {own.num_tokens:,} | {name} | {lengths} |")
        return

    outcomes = measure_accepted(model, each, tokens, threads, temperature)
    widths = " / ".join(map(str, WIDTHS))
    print(f"| prompts | tokens | tokens a step of {widths} rows | without, tokens/s | with | same texts |")
    print("|---|---|---|---|---|---|")
    for kind, one in outcomes.items():
        lengths = " / ".join(f"{one.tokens_a_step(width):.2f}" for width in WIDTHS)
        rates = " | ".join(f"{one.num_tokens / one.seconds[is_on]:.1f}" for is_on in (False, True))
        print(f"| {each} {kind} | {one.num_tokens:,} | {lengths} | {rates} | {one.num_equal} of {each} |")
