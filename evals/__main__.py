"""`python -m evals tasks ...`: the group `tandem eval` where nothing is installed but the packages it needs."""

from evals.cli import app

if __name__ == "__main__":
    app(prog_name="python -m evals")
