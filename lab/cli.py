"""Name the laboratory's commands. Each imports what it runs only when it runs, so that listing them is quick."""

import typer

from evals.cli import app as evals
from lab.kernels.commands import app as kernel
from lab.quality_lines import quality_lines
from lab.speed.cpu_decode_command import cpu_decode
from lab.speed.drafts_command import drafts
from lab.speed.load_commands import load_simulated, load_timeline
from lab.speed.peer_commands import peers_llama, peers_serve, peers_table
from lab.speed.trace_command import trace

app = typer.Typer(no_args_is_help=True, help="Measure what the pages and the log of the project name.")

app.add_typer(kernel, name="kernel")


def register_methods() -> None:
    """Register the laboratory's methods, so that `tandem eval` has them beside its own."""
    import lab.methods  # noqa: F401


app.add_typer(
    evals, name="eval", help="Run `tandem eval` with the methods of the laboratory, too.", callback=register_methods
)
for command in (cpu_decode, drafts, load_simulated, load_timeline, trace, peers_llama, peers_serve, peers_table,
                quality_lines):  # fmt: skip
    app.command()(command)
