"""Run the laboratory's commands: `python -m lab COMMAND ...`."""

from lab.cli import app

app(prog_name="python -m lab")
