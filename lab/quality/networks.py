"""Networks that predict a head's next block maxima, to be compared with the one that serves.

AttentionPredictor, Table 4. Each takes `[heads, rows, blocks]`, oldest row first, zeros behind a head's own blocks, and
gives scores `[heads, blocks]`. What the paper says of them is a line each; sizes are chosen so that parameters are as
many as it tells. Only the one that serves is ever saved.
"""

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from gpu.predictor.network import CHANNELS, WIDE_CHANNELS, PredictorNetwork

WIDTH = 16  # blocks that a block-wise network sees
_MLP = (256, 128)
_LSTM, _LSTM_LAYERS = 512, 2


class PerPlace(nn.Module):
    """An MLP over the history of each place, whatever stands beside it; 50K parameters for 64 rows."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        first, second = _MLP
        self.layers = nn.Sequential(
            nn.Linear(rows, first), nn.ReLU(), nn.Linear(first, second), nn.ReLU(), nn.Linear(second, 1)
        )

    def forward(self, history: Tensor, widths: Tensor) -> Tensor:
        return self.layers(history.transpose(1, 2))[..., 0]


class RecurrentWindows(nn.Module):
    """An LSTM over the steps of WIDTH places at a time, each window by itself; 3.2M parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, _LSTM, _LSTM_LAYERS, batch_first=True)
        self.last = nn.Linear(_LSTM, WIDTH)

    def forward(self, history: Tensor, widths: Tensor) -> Tensor:
        windows = in_windows(history)
        return join_windows(self.last(self.lstm(windows)[0][:, -1]), history)


class ConvolvedWindows(nn.Module):
    """The convolutions that serve over WIDTH places at a time, and a layer over all channels and places of a window."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.wide = nn.Conv2d(CHANNELS, WIDE_CHANNELS, 3, padding=1)
        self.last = nn.Linear(WIDE_CHANNELS * WIDTH, WIDTH)

    def forward(self, history: Tensor, widths: Tensor) -> Tensor:
        seen = self.wide(self.narrow(in_windows(history)[:, None]).relu()).relu().mean(2)  # [windows, channels, WIDTH]
        return join_windows(self.last(seen.flatten(1)), history)


def in_windows(history: Tensor) -> Tensor:
    """Return `[heads * windows, rows, WIDTH]`, zeros behind the last block."""
    padded = nn.functional.pad(history, (0, -history.shape[2] % WIDTH))
    return padded.unflatten(2, (-1, WIDTH)).transpose(1, 2).flatten(0, 1)


def join_windows(scores: Tensor, history: Tensor) -> Tensor:
    """Return `[heads * windows, WIDTH]` back to `[heads, blocks]`."""
    return scores.reshape(len(history), -1)[:, : history.shape[2]]


def kinds(rows: int) -> Mapping[str, Callable[[], nn.Module]]:
    """By the paper's names; rows: of a history."""
    return {
        "CNN": PredictorNetwork,
        "MLP": lambda: PerPlace(rows),
        "CNN-block": ConvolvedWindows,
        "LSTM-block": RecurrentWindows,
    }


def num_parameters(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())
