"""Run `python -m evals.tuning lsh ...`: the group `tandem tune` where nothing is installed but the packages it
needs.
"""

from evals.tuning.command import app

if __name__ == "__main__":
    app(prog_name="python -m evals.tuning")
