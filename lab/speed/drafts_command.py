"""Run `python -m lab drafts`: arguments, and the tables of docs/methods/drafts.md."""

from pathlib import Path
from typing import Annotated

import typer


def drafts(
    model: Annotated[Path, typer.Option(help="a folder or a GGUF file, on the CPU")] = Path(
        "models/smollm2-135m/SmolLM2-135M-Instruct.Q4_1.gguf"
    ),
    each: Annotated[int, typer.Option(min=1, help="prompts of each kind")] = 10,
    tokens: Annotated[int, typer.Option(min=2, help="of a text, at most")] = 400,
    threads: Annotated[int, typer.Option(min=1)] = 2,
    temperature: Annotated[float, typer.Option(min=0)] = 0.0,
    profile: Annotated[str | None, typer.Option(help="that drafts over host memory, greedy: indexed, sampled")] = None,
) -> None:
    """Measure how many tokens of n-gram drafts a model accepts, and what that saves on this CPU; or of a profile's."""
    from lab.speed.accepted_drafts import WIDTHS, measure_accepted, measure_by_profile

    if profile is not None:
        found = measure_by_profile(model, profile, each, tokens, threads, lambda line: typer.echo(line, err=True))
        print(f"| prompts | tokens each | tokens of texts | tokens a step of 8 rows by {profile} | by n-grams |")
        print("|---|---|---|---|---|")
        for kind, own in found.items():
            if own.num_texts:
                lengths = " | ".join(f"{own.num_tokens / steps:.2f}" for steps in (own.steps, own.ngram_steps))
                mean = own.prompt_tokens // own.num_texts
                print(f"| {own.num_texts} {kind} | {mean:,} | {own.num_tokens:,} | {lengths} |")
        return

    outcomes = measure_accepted(model, each, tokens, threads, temperature)
    widths = " / ".join(map(str, WIDTHS))
    print(f"| prompts | tokens | tokens a step of {widths} rows | without, tokens/s | with | same texts |")
    print("|---|---|---|---|---|---|")
    for kind, one in outcomes.items():
        lengths = " / ".join(f"{one.tokens_a_step(width):.2f}" for width in WIDTHS)
        rates = " | ".join(f"{one.num_tokens / one.seconds[is_on]:.1f}" for is_on in (False, True))
        print(f"| {each} {kind} | {one.num_tokens:,} | {lengths} | {rates} | {one.num_equal} of {each} |")
