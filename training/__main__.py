"""Run `python -m training predictor ...`, as `tandem train` does where nothing is installed but what it needs."""

from training.cli import app

if __name__ == "__main__":
    app(prog_name="python -m training")
