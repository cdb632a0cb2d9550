"""Run `python -m evals.tuning lsh ...`: the commands of `tandem tune`, for environments without an installed Tandem."""

from evals.tuning.command import app

if __name__ == "__main__":
    app(prog_name="python -m evals.tuning")
