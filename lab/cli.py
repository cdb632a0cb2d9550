"""Name the laboratory's commands. Each imports what it runs when it runs, so that listing them is quick."""

import typer

from evals.cli import app as evals
from lab.kernels.commands import app as kernel
from lab.mac.command import mac
from lab.quality.errors_command import errors
from lab.quality.mass_command import mass
from lab.quality.networks_command import networks
from lab.quality.predicted_command import predicted
from lab.quality.recovery_command import recovery
from lab.quality.results_command import results
from lab.quality.selections_command import selections
from lab.speed.commands import beside, constrained
from lab.speed.drafts_command import drafts
from lab.speed.load_commands import load_simulated, load_timeline
from lab.speed.load_weights_command import load_weights
from lab.speed.peer_commands import peers_llama, peers_serve, peers_table
from lab.speed.schemas_command import schemas
from lab.speed.trace_command import trace

app = typer.Typer(no_args_is_help=True, help="Reproduce the figures of the papers and of lab/RESULTS.md.")

app.add_typer(kernel, name="kernel")
app.add_typer(evals, name="eval", help="Run `tandem eval` with the methods of the laboratory, too.")
for command in (
    mac, errors, mass, networks, predicted, recovery, results, selections,
    beside, constrained, drafts, load_simulated, load_timeline, load_weights, schemas, trace,
    peers_llama, peers_serve, peers_table,
):  # fmt: skip
    app.command()(command)
