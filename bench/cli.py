"""The `tandem bench` group. Each command imports what it measures when it runs, so that listing them is quick."""

import typer

from bench.context_commands import beside, constrained, documents, long, prefill
from bench.kernel_commands import app as kernel
from bench.load.command import serve
from bench.load_weights_command import load_weights
from bench.machine_commands import engine, rates
from bench.schemas_command import schemas

app = typer.Typer(no_args_is_help=True, help="Measure: every number next to its floor.")

app.command("serve")(serve)
app.command("engine")(engine)
app.command("long")(long)
app.command("beside")(beside)
app.command("prefill")(prefill)
app.command("load-weights")(load_weights)
app.command("documents")(documents)
app.command("constrained")(constrained)
app.command("schemas")(schemas)
app.command("rates")(rates)
app.add_typer(kernel, name="kernel")
