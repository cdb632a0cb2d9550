"""Run `python -m evals tasks ...`, as `tandem eval` does where nothing is installed but what it needs."""

from evals.cli import app

if __name__ == "__main__":
    app(prog_name="python -m evals")
