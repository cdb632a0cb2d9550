"""The `tandem eval` group. Each command imports what it runs when it runs, so that listing them is quick."""

import typer

app = typer.Typer(no_args_is_help=True, help="Judge quality: what an attention method keeps and what it loses.")
