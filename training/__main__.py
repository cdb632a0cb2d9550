"""Run `python -m training predictor ...`: the commands of `tandem train`, where Tandem is not installed."""

from training.cli import app

if __name__ == "__main__":
    app(prog_name="python -m training")
