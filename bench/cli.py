"""Name the commands of `tandem bench`. Each imports what it measures only when it runs, so that listing is quick."""

import typer

from bench.context_commands import agents, disk, documents, long, prefill
from bench.load.serve_command import serve
from bench.machine_commands import drafts, engine, rates
from bench.op.op_command import op
from bench.soak.soak_command import soak

app = typer.Typer(no_args_is_help=True, help="Measure: every number next to its floor.")

app.command("serve")(serve)
app.command("engine")(engine)
app.command("drafts")(drafts)
app.command("long")(long)
app.command("prefill")(prefill)
app.command("documents")(documents)
app.command("disk")(disk)
app.command("agents")(agents)
app.command("rates")(rates)
app.command("op")(op)
app.command("soak")(soak)
