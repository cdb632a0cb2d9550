"""A stand-in for the library on the CPU, by its published layout before it repacks: what is asked of it is checked, and
a product is made of the tensors that it was given.
"""

from collections.abc import Callable
from importlib.metadata import PackageNotFoundError
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from gpu.weights import humming_matrix
from tests.gpu.packed_oracle import e4m3

ENDS = (1, 8, 64, 2**30)  # of ranges of token counts


class Library:
    """`made`: ids of kernels that were compiled, in order; `launched`: those that ran, with how many tokens."""

    def __init__(self) -> None:
        self.made: list[int] = []
        self.launched: list[tuple[int, int]] = []
        self.ops = SimpleNamespace(launch_kernel=self.launch_kernel)
        self.HummingKernel = SimpleNamespace(prepare_kernels=self.prepare_kernels)
        self.HummingWeightSchema = SimpleNamespace
        self._configs: dict[str, Any] = {}

    def prepare_layer_config(self, rows: int, inner: int, schema: Any, *, torch_dtype: Any, device: Any) -> Any:
        assert torch_dtype == torch.bfloat16
        text = f"{rows} {inner} {schema}"
        self._configs[text] = SimpleNamespace(rows=rows, inner=inner, to_str=lambda: text, **vars(schema))
        return self._configs[text]

    def get_heuristics_config(self, config: Any, *, device: Any) -> list[list[Any]]:
        """The first two ranges have one kernel."""
        ranges = zip((0, *ENDS), ENDS, strict=False)
        return [[begin, end, {"tuned": max(end, 8), "num_sms": end % 100}] for begin, end in ranges]

    def transform_humming_tensors(self, config: Any, tensors: dict[str, Tensor], *, already_padded: bool) -> Any:
        assert already_padded
        bits = 4 if config.b_dtype == "uint4" else 8
        size, size_n = config.weight_scale_group_size, config.weight_scale_group_size_n
        groups = config.inner // (size or config.inner)
        scales = (config.rows // size_n, groups) if size_n else (config.rows, groups)
        wanted = {
            "weight": ((config.rows, config.inner * bits // 32), torch.int32),
            "weight_scale": (scales, torch.float32 if size_n else torch.bfloat16),
        }
        if config.has_zero_point:
            wanted["zero_point"] = ((config.rows * bits // 32, groups), torch.int32)
        assert {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()} == wanted
        assert all(tensor.is_contiguous() for tensor in tensors.values())
        return dict(tensors)

    def prepare_kernels(self, config: str, compute: None, ranges: list[list[Any]], device: Any) -> Tensor:
        assert config in self._configs
        ids = [100 * (1 + list(self._configs).index(config)) + ENDS.index(made["tuned"]) for _, _, made in ranges]
        assert len(set(ids)) == len(ids), "compiled twice"
        self.made += ids
        return torch.tensor([(begin, end, id, 0) for (begin, end, _), id in zip(ranges, ids, strict=True)]).flatten()

    def launch_kernel(self, *, configs: Tensor, inputs: Tensor, outputs: Tensor, locks: Tensor, weight: Tensor,
                      weight_scale: Tensor, zero_point: Tensor | None = None) -> Tensor:  # fmt: skip
        id, sms = configs.tolist()
        assert id in self.made
        assert sms in [end % 100 for end in ENDS if max(end, 8) == ENDS[id % 100]]
        assert not bool(locks.any())
        self.launched.append((id, len(inputs)))
        config = list(self._configs.values())[id // 100 - 1]
        numbers = _numbers(weight, config.rows, config.inner)
        if config.b_dtype == "float8e4m3":
            values = e4m3(numbers.astype(np.uint8))
        elif zero_point is None:
            values = numbers - 2.0 ** (4 if config.b_dtype == "uint4" else 8) / 2
        else:
            zeros = _numbers(zero_point.t().contiguous(), zero_point.shape[1], config.rows).T
            values = numbers - np.repeat(zeros, config.inner // zeros.shape[1], 1).astype(float)
        scales = weight_scale.double().numpy()
        scales = np.repeat(scales, config.rows // scales.shape[0], 0)
        wide = values * np.repeat(scales, config.inner // scales.shape[1], 1)
        return outputs.copy_(inputs.double() @ torch.from_numpy(wide).t())


def stand_in(monkeypatch: pytest.MonkeyPatch) -> Library:
    """From now on it is the library, and the CPU a device that it multiplies on."""
    made = Library()
    monkeypatch.setattr(humming_matrix, "_library", lambda: made)
    monkeypatch.setattr(humming_matrix, "_MADE", {})
    monkeypatch.setattr(humming_matrix, "_locks", lambda device: torch.zeros(humming_matrix.LOCKS, dtype=torch.int32))
    monkeypatch.setenv("HUMMING_CACHE_DIR", "folder")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr("gpu.weights.weights.why_unpacked", lambda *_: None)
    return made


def _numbers(words: Tensor, rows: int, columns: int) -> np.ndarray:
    """Of words that have the first column in their lowest bits."""
    bits = words.shape[1] * 32 // columns
    shifts = np.arange(0, 32, bits)
    parts = (words.numpy().view(np.uint32)[:, :, None] >> shifts) & (2**bits - 1)
    return parts.reshape(rows, columns)


def found_version(found: str) -> Callable[[str], str]:
    """In place of `importlib.metadata.version`; found: "none" where nothing is installed."""

    def version(package: str) -> str:
        assert package == "humming-kernels"
        if found == "none":
            raise PackageNotFoundError
        return found

    return version
