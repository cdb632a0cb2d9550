"""Float64 numpy oracles of the kernels, written from the formulas, and the devices and dtypes that tests run on."""

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tolerances import KERNEL_BFLOAT16, KERNEL_FLOAT32

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
    ),
]
DTYPES = [pytest.param(torch.float32, id="float32"), pytest.param(torch.bfloat16, id="bfloat16")]
NORM_EPS = 1e-5
KERNEL_TOLERANCE = {torch.float32: KERNEL_FLOAT32, torch.bfloat16: KERNEL_BFLOAT16}


def random(generator: np.random.Generator, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Tensor:
    return torch.from_numpy(generator.standard_normal(shape)).to(device, dtype)


def wide(tensor: Tensor) -> np.ndarray:
    return tensor.detach().cpu().double().numpy()


def distance(got: Tensor, wanted: np.ndarray) -> float:
    """Norm of the difference over the norm of what was wanted; NaN where anything is not a number."""
    return float(np.linalg.norm(wide(got) - wanted) / np.linalg.norm(wanted))


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + eps)


def cut_bfloat16(values: np.ndarray) -> np.ndarray:
    """As Triton's interpreter makes bf16 of float32: the lower half of the bits is cut off, where a card rounds.

    A number between 1 and 2 loses 2**-8 on average, others in proportion. So 2.8e-3 of a number is lost (2**-8 times
    0.72, the mean of one over a mantissa), always towards 0; rounding errs by 1.7e-3 to either side.
    """
    return (values.astype(np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32).astype(float)


def interpreted_rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """`rms_norm` of bf16 under the interpreter: cut before the weight and behind it, so 5.6e-3 too small on average."""
    return cut_bfloat16(cut_bfloat16(rms_norm(x, np.ones_like(weight), eps)) * weight)


def swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    return gate / (1.0 + np.exp(-gate)) * up


def squared_relu(up: np.ndarray) -> np.ndarray:
    return np.maximum(up, 0.0) ** 2


def clamped_swiglu(gate_up: np.ndarray) -> np.ndarray:
    gate, up = np.split(gate_up, 2, axis=-1)
    gate = np.minimum(gate, 7.0)
    return gate / (1.0 + np.exp(-1.702 * gate)) * (np.clip(up, -7.0, 7.0) + 1.0)


def rotate(x: np.ndarray, angles: np.ndarray) -> np.ndarray:
    """Pairs (i, i + dim / 2) of x `[tokens, heads, dim]` as complex numbers, turned by angles `[tokens, dim / 2]`."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def attend(query: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> tuple[np.ndarray, np.ndarray]:
    """query `[heads, dim]`, keys and values `[context, kv_heads, dim]` -> out `[heads, dim]`, lse `[heads]`."""
    heads, dim = query.shape
    out, lse = np.zeros((heads, dim)), np.full(heads, -np.inf)
    for head in range(heads):
        kv_head = head // (heads // keys.shape[1])
        if len(keys):
            logits = keys[:, kv_head] @ query[head] * scale
            top = logits.max()
            weights = np.exp(logits - top)
            lse[head] = top + np.log(weights.sum())
            out[head] = weights @ values[:, kv_head] / weights.sum()
    return out, lse
