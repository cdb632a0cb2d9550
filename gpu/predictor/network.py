"""Predict a head's next block maxima from those of its last steps, and read and write the network's files.

AttentionPredictor, section 4.2: convolution 3x3 (1 to 16), ReLU, 3x3 (16 to 32), ReLU, mean over the history, 1x1 to
one channel. The names of its parameters are those of the authors' files. Invariants: only tensors are read from a file,
and no code in it is run; a row of the batch depends on its own first `widths` blocks alone, as if it had no more.
"""

from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

CHANNELS, WIDE_CHANNELS = 16, 32
SHAPES: dict[str, tuple[int, ...]] = {
    "conv1.weight": (CHANNELS, 1, 3, 3),
    "conv1.bias": (CHANNELS,),
    "conv2.weight": (WIDE_CHANNELS, CHANNELS, 3, 3),
    "conv2.bias": (WIDE_CHANNELS,),
    "conv3.weight": (1, WIDE_CHANNELS, 1),
    "conv3.bias": (1,),
}
SUFFIXES = (".safetensors", ".pth")


class PredictorError(ValueError):
    """A file that is not a predictor. The message names the file, the tensor and what was wanted."""


class PredictorNetwork(nn.Module):
    """The network. It has 4,833 parameters for any model, history and context."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, CHANNELS, 3, padding=1)
        self.conv2 = nn.Conv2d(CHANNELS, WIDE_CHANNELS, 3, padding=1)
        self.conv3 = nn.Conv1d(WIDE_CHANNELS, 1, 1)

    def forward(self, history: Tensor, widths: Tensor | None) -> Tensor:
        """Return scores `[heads, blocks]` of the next step; history `[heads, rows, blocks]`, oldest row first.

        widths: int `[heads]`, number of blocks of each head; scores behind them are void. None: all blocks.
        """
        inside = None if widths is None else self._inside(history, widths)  # [heads, 1, 1, blocks]
        narrow = self.conv1(_within(history[:, None], inside)).relu()  # [heads, channels, rows, blocks]
        wide = self.conv2(_within(narrow, inside)).relu()
        return self.conv3(wide.mean(2))[:, 0]

    @staticmethod
    def _inside(history: Tensor, widths: Tensor) -> Tensor:
        return (torch.arange(history.shape[-1], device=history.device) < widths[:, None])[:, None, None]


def _within(values: Tensor, inside: Tensor | None) -> Tensor:
    return values if inside is None else values.masked_fill(~inside, 0)


def load_network(path: Path) -> PredictorNetwork:
    """Load a predictor in float32 on the CPU, from our `.safetensors` or the authors' `.pth`.

    A pickle is read as weights only. Raises PredictorError for another suffix, names, shapes or numbers, and OSError.
    """
    if path.suffix not in SUFFIXES:
        raise PredictorError(f"predictor {path}: suffix {path.suffix!r}; wanted one of {', '.join(SUFFIXES)}")
    try:
        if path.suffix == ".safetensors":
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, UnpicklingError, RuntimeError, EOFError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise PredictorError(f"predictor {path}: holds no tensors ({reason}); give a file of weights alone") from None
    network = PredictorNetwork()
    network.load_state_dict(check_tensors(str(path), tensors))
    return network.eval().requires_grad_(False)


def check_tensors(name: str, tensors: object) -> dict[str, Tensor]:
    """Return the named tensors in float32. Raises PredictorError unless they are those of the network, and finite."""
    if not isinstance(tensors, Mapping):
        raise PredictorError(f"predictor {name}: holds a {type(tensors).__name__}; wanted tensors by name")
    missing, unknown = sorted(set(SHAPES) - set(tensors)), sorted(map(str, set(tensors) - set(SHAPES)))
    if missing or unknown:
        wrong = f"lacks {missing[0]}" if missing else f"has {unknown[0]}, which is not of the network"
        raise PredictorError(f"predictor {name}: {wrong}; wanted {', '.join(SHAPES)}")
    checked = {}
    for key, shape in SHAPES.items():
        tensor = tensors[key]
        got = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        if got != shape:
            raise PredictorError(f"predictor {name}: {key} is {got}; wanted {shape}")
        checked[key] = tensor.detach().float()
        if not checked[key].isfinite().all():
            raise PredictorError(f"predictor {name}: {key} has numbers that are not finite; train it again")
    return checked


def save_network(network: PredictorNetwork, path: Path, facts: Mapping[str, str]) -> None:
    """Write `.safetensors` with facts about its training as metadata."""
    tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in network.state_dict().items()}
    save_file(tensors, path, metadata=dict(facts))
