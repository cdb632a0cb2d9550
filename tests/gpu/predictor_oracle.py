"""The predictor in float64 numpy, written from AttentionPredictor, section 4.2: tap by tap, padded with zeros."""

import numpy as np

Parameters = dict[str, np.ndarray]


def random_parameters(seed: int) -> Parameters:
    """Of such a size that activations and scores are of order one."""
    draw = np.random.default_rng(seed).standard_normal
    return {
        "conv1.weight": draw((16, 1, 3, 3)),
        "conv1.bias": draw(16) / 10,
        "conv2.weight": draw((32, 16, 3, 3)) / 4,
        "conv2.bias": draw(32) / 10,
        "conv3.weight": draw((1, 32, 1)) / 2,
        "conv3.bias": draw(1) / 10,
    }


def convolve(image: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """`[channels, rows, columns]` by `[out, channels, 3, 3]`, zeros around."""
    rows, columns = image.shape[1:]
    framed = np.zeros((image.shape[0], rows + 2, columns + 2))
    framed[:, 1:-1, 1:-1] = image
    out = np.zeros((weight.shape[0], rows, columns)) + bias[:, None, None]
    for down in range(3):
        for right in range(3):
            out += np.einsum("oc,crb->orb", weight[:, :, down, right],
                             framed[:, down : down + rows, right : right + columns])  # fmt: skip
    return out


def predict(history: np.ndarray, parameters: Parameters) -> np.ndarray:
    """Scores `[blocks]` of one head's history `[rows, blocks]`."""
    narrow = np.maximum(convolve(history[None], parameters["conv1.weight"], parameters["conv1.bias"]), 0)
    wide = np.maximum(convolve(narrow, parameters["conv2.weight"], parameters["conv2.bias"]), 0)
    return parameters["conv3.weight"][0, :, 0] @ wide.mean(1) + parameters["conv3.bias"][0]
