"""Run `python -m evals tasks ...`: the commands of `tandem eval`, for environments in which Tandem is not installed."""

from evals.cli import app

if __name__ == "__main__":
    app(prog_name="python -m evals")
