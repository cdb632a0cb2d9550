"""Hold the predictors that are compared to the sizes of the paper."""

import json

import pytest
import torch
from typer.testing import CliRunner

from lab.cli import app
from lab.quality.networks import WIDTH, in_windows, join_windows, kinds, num_parameters
from tests.gpu.reference_model import FOLDER


def test_networks_that_are_compared_are_as_large_as_the_paper_says() -> None:
    """But the block-wise convolution, of whose layers it says too little: 21K."""
    counts = {name: num_parameters(make()) for name, make in kinds(64).items()}
    assert counts == {"CNN": 4_833, "MLP": 49_665, "CNN-block": 13_008, "LSTM-block": 3_194_896}


@pytest.mark.parametrize(("name", "sees"), [("CNN", range(18, 23)), ("MLP", [20]), ("CNN-block", range(16, 32)),
                                            ("LSTM-block", range(16, 32))])  # fmt: skip
def test_a_networks_score_follows_from_the_blocks_that_it_sees(name: str, sees: list[int]) -> None:
    torch.manual_seed(0)
    network, history = kinds(5)[name]().eval().requires_grad_(False), torch.rand(1, 5, 40)
    widths = torch.tensor([40])
    before = network(history, widths)[0]
    assert before.shape == (40,)
    changing = []
    for block in range(40):
        other = history.clone()
        other[:, :, block] += 1
        if abs(float(network(other, widths)[0, 20] - before[20])) > 0:
            changing.append(block)
    assert changing == list(sees)


def test_windows_are_cut_and_joined_in_order() -> None:
    history = torch.arange(2 * 3 * 37.0).view(2, 3, 37)
    windows = in_windows(history)
    assert windows.shape == (6, 3, WIDTH)
    assert torch.equal(join_windows(windows[:, -1], history), history[:, -1])
    assert windows[2, :, 37 % WIDTH :].abs().sum() == 0


def test_networks_are_compared_without_a_predictor_being_written(tmp_path) -> None:
    out = tmp_path / "compared.json"
    settings = {"lengths": 180, "texts": 2, "targets": 4, "history": 8, "epochs": 1, "per-epoch": 1, "batch": 2}
    command = ["networks", "--model", str(FOLDER), "--out", str(out), "--device", "cpu"]
    command += [word for name, value in settings.items() for word in (f"--{name}", str(value))]
    done = CliRunner().invoke(app, [*command, "--kinds", "CNN,MLP"])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    assert [(row["kind"], 0 < row["recovery"] <= 1) for row in report["kinds"]] == [("CNN", True), ("MLP", True)]
    assert [path.name for path in tmp_path.iterdir()] == ["compared.json"]
    refused = CliRunner().invoke(app, [*command, "--kinds", "GRU"])
    assert refused.exit_code == 1
    assert "unknown 'GRU'; known: CNN, MLP" in refused.stderr
