"""Run `python -m lab predicted`: runs about predicted blocks put together, as `python -m lab results --from` takes
them.
"""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from evals.options import one_line_errors

Files = list[Path]


def predicted(
    out: Annotated[Path, typer.Option("--out", help="the JSON to write")],
    machine: Annotated[str, typer.Option("--machine", help="in words")],
    date: Annotated[str, typer.Option("--date", help="of the runs")],
    recovery: Annotated[Files, typer.Option("--recovery", help="JSON of `python -m lab recovery`")] = [],  # noqa: B006
    served: Annotated[Files, typer.Option("--served", help="likewise, with the settings that serve")] = [],  # noqa: B006
    ablations: Annotated[list[str], typer.Option("--ablation", help="WHAT=FILE, likewise")] = [],  # noqa: B006
    fidelity: Annotated[Files, typer.Option("--fidelity", help="JSON of `tandem eval fidelity`")] = [],  # noqa: B006
    errors: Annotated[Files, typer.Option("--errors", help="JSON of `python -m lab errors`")] = [],  # noqa: B006
    tasks: Annotated[Files, typer.Option("--tasks", help="JSON of `tandem eval tasks`")] = [],  # noqa: B006
    onto: Annotated[Path | None, typer.Option("--onto", help="what was put together before: rows that are made again "
                                              "take their places in it")] = None,
) -> None:  # fmt: skip
    """Put runs about predicted blocks together: `python -m lab results --from OUT` then writes their tables."""
    with one_line_errors():
        from evals.report.document import finite, write_document
        from lab.quality.predicted_report import gather, renew, summarise

        varied = [one.partition("=") for one in ablations]
        if any(not path for _, _, path in varied):
            raise ValueError(f"--ablation: got {ablations}; wanted WHAT=FILE")
        document = gather(
            _read(recovery), {name: _read([Path(path)])[0] for name, _, path in varied}, _read(fidelity), _read(errors),
            _read(tasks), machine, date, _read(served),
        )  # fmt: skip
        if onto is not None:
            document = renew(_read([onto])[0], document)
        write_document(out, finite(document))
        print(f"{summarise(document)}\n\npredicted: {out}")


def _read(paths: Files) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
