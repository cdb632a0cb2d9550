"""Run `tandem eval judge`: report whether defaults hold, by the JSON rows of `tandem eval tasks` runs."""

import json
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Annotated

import typer

from evals.options import Json, one_line_errors


def judge(
    files: Annotated[list[Path], typer.Argument(help="JSON of `tandem eval tasks` runs, which are pooled")],
    only: Annotated[list[str], typer.Option("--methods", help="judge only these, such as 'profile:*'; "
                                            "repeatable")] = [],  # noqa: B006
    chosen_on: Annotated[list[int], typer.Option("--chosen-on", help="a seed of prompts on which settings were chosen: "
                                                 "its rows count for nothing; repeatable")] = [],  # noqa: B006
    json_path: Json = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="write the tables as Markdown here")] = None,
) -> None:  # fmt: skip
    """Judge methods by their paired loss pooled over tasks: holds, fails or undecided, and why.

    Exit status: 0 where all hold, else 1.
    """
    with one_line_errors():
        from rich.table import Table

        from evals import aims
        from evals.report.document import finite, write_document, write_text
        from evals.report.table import open_console
        from evals.report.verdicts import render_cells, render_verdicts

        rows = [row for file in files for row in json.loads(file.read_text())["rows"] if "task" in row]
        aim = aims.Aim(("",), (), None, None, tuple(chosen_on))
        methods = [one for one in aims.meant(rows, aim) if not only or any(fnmatchcase(one, each) for each in only)]
        if not methods:
            raise ValueError("judge: the files have no rows of such methods beside full attention's")
        found = {method: aims.judge(rows, method, aim) for method in methods}
        table = Table("method", "verdict", "pairs", "difference", "tasks", "why")
        for method, one in found.items():
            table.add_row(method, *aims.told_of(one))
        open_console().print(table)
        if json_path is not None:
            told = {method: aims.to_json(one) for method, one in found.items()}
            write_document(json_path, finite({"files": [str(file) for file in files], "methods": told}))
        if markdown is not None:
            write_text(
                markdown, "\n".join([*render_verdicts(rows, aim, methods), "", *render_cells(rows, methods), ""])
            )
        if any(one.verdict != aims.HOLDS for one in found.values()):
            raise typer.Exit(1)
