"""Run `python -m lab schemas`: arguments, and tables of what became of a suite."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table


def schemas(
    suite: Annotated[Path, typer.Option(metavar="DIR", help="the `tests` folder of JSON Schema's published suite")],
    model: Annotated[Path, typer.Option(help="a folder whose vocabulary writes")] = Path("deploy/models/reference"),
    texts: Annotated[int, typer.Option(min=0, help="random texts of each schema that compiles")] = 3,
) -> None:
    """Compile a suite of JSON schemas: which keywords are refused, and whether what masks allow is valid."""
    from gpu.config import ModelConfig
    from gpu.model.architecture import load_architecture
    from lab.speed.schemas import Writer, examine_suite
    from scheduler.constraints.constraints import read_tokens

    console = Console()
    config = ModelConfig(path=model)
    writer = Writer(read_tokens(config, load_architecture(config).vocab_size))
    table = Table("draft", "schemas", "compiled", "refused", "valid", "invalid", "failed", "unchecked", "not ended",
                  "invalid data accepted")  # fmt: skip
    wrong: list[str] = []
    try:
        for name, draft in examine_suite(suite, writer, texts):
            outcomes = [draft.texts[kind] for kind in ("valid", "invalid", "failed", "unchecked", "not ended")]
            counts = [draft.groups, draft.compiled, draft.refused.total(), *outcomes, len(draft.invalid_accepted)]
            table.add_row(name, *map(str, counts))
            refused = ", ".join(f"{keyword} {count}" for keyword, count in draft.refused.most_common())
            console.print(f"{name}: refused {refused}", highlight=False, markup=False)
            wrong += [f"{name}/{what}" for what in (*draft.wrong, *draft.invalid_accepted)]
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--suite") from None
    console.print(table)
    for what in wrong:
        console.print(what, highlight=False, markup=False, soft_wrap=True)
