"""Define a weight format: the folder of `gpu.formats` that reads how a checkpoint's matrices of few bits are stored."""

import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

from gpu.model.matrix_format import Quantisation
from gpu.model.spec import ModelError

FOLDER = "gpu.formats"
# How others run a checkpoint, and how it was made.
_HARMLESS = frozenset(
    (
        "_pre_quantization_dtype", "act_dynamic", "act_group_size", "activation_scale_ub", "activation_scheme", "amp",
        "autoround_version", "backend", "batch_size", "damp_auto_increment", "damp_percent", "data_type", "dataset",
        "dequantize","disable_exllama", "do_fuse", "enable_minmax_tuning", "enable_quanted_input", "exllama_config",
        "fuse_max_seq_len", "global_compression_ratio", "gradient_accumulate_steps","iters",
        "kv_cache_scheme", "low_gpu_mem_usage", "lr", "max_input_length", "meta", "minmax_lr", "model_file_base_name",
        "model_name_or_path", "model_seqlen", "module_name_preceding_first_block", "modules_in_block_to_quantize",
        "modules_to_fuse", "nsamples", "offload", "quantization_status", "quantizer", "rotation_config", "scale_dtype",
        "seqlen", "static_groups", "to_quant_block_names", "tokenizer",
        "true_sequential", "use_cuda_fp16", "use_exllama", "use_ipex", "version",
    )
)  # fmt: skip


class QuantisationKeys:
    """The keys of one configuration, each of which is read, harmless, empty, or refused."""

    def __init__(self, config: Mapping[str, Any], where: str) -> None:
        self.config, self.where = config, where
        self.read: set[str] = set()

    def get(self, key: str) -> Any:
        """Return its value, or None."""
        self.read.add(key)
        return self.config.get(key)

    def only(self, key: str, *served: Any) -> Any:
        """Return its value, which must be one of these. Absent and null mean the first. Raises ModelError."""
        value = self.get(key)
        value = served[0] if value is None else value
        if value not in served or isinstance(value, bool) != isinstance(served[served.index(value)], bool):
            raise self.refused(key, value, f"served: {', '.join(map(repr, served))}")
        return value

    def group(self, key: str) -> int | None:
        """Return how many columns share a scale; None, for -1 and null: a row's all. Raises ModelError."""
        value = self.get(key)
        if value in (None, -1):
            return None
        if not isinstance(value, int) or isinstance(value, bool) or value < 8 or value % 8:
            raise self.refused(key, value, "served: -1 and multiples of 8")
        return value

    def names(self, key: str) -> tuple[str, ...]:
        """Return a list of modules' names. Raises ModelError for anything else."""
        value = self.get(key) or []
        if not isinstance(value, list) or any(not isinstance(name, str) for name in value):
            raise self.refused(key, value, "wanted a list of modules' names")
        return tuple(value)

    def empty(self, key: str) -> None:
        """Raise ModelError unless it is absent or empty."""
        value = self.get(key)
        if value not in (None, {}, [], False):
            raise self.refused(key, value, "served: none")

    def part(self, key: str) -> "QuantisationKeys":
        """Return the keys of a mapping in it. Raises ModelError for anything else."""
        value = self.get(key)
        if not isinstance(value, dict):
            raise self.refused(key, value, "wanted a mapping")
        return QuantisationKeys(value, f"{self.where}.{key}")

    def refused(self, key: str, value: Any, words: str) -> ModelError:
        """Return the error for a value that is not served."""
        return ModelError(f"model: {self.where}.{key} is {value!r}; {words}")

    def refuse_unread(self) -> None:
        """Raise ModelError for the first key that was not read and is not harmless."""
        for key, value in self.config.items():
            if key not in self.read and key not in _HARMLESS and value is not None:
                raise ModelError(f"model: {self.where}.{key} is {value!r}, and this key is not known; wanted it absent")

    def block(self, key: str, block: Any) -> tuple[int, int]:
        """Return rows and columns that share a scale. Raises ModelError unless both are powers of two."""
        is_pair = isinstance(block, list) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)
        if not is_pair or any(n & (n - 1) for n in block) or block[1] < 8:
            raise self.refused(key, block, "wanted two powers of two, as [128, 128]")
        return block[0], block[1]


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A weight format.

    methods: by `quant_method` of a `quantization_config`, the function that reads it; empty if files state the format
    in
        another way.
    schemes: names in `Quantisation.scheme`, each a layout of tensors.
    tensors: the module that reads them with torch, by its `stored_tensors(scheme, stored, rows, row_block)`, and, if
    one
        tensor may have all experts, its `stacked_tensors(stored, experts)`.
    scale_suffixes: ends of the names of tensors with integers' scales, which all have one dtype in a checkpoint.
    scale_dtype: that dtype, if it is the same in all files; None: the dtype of the tensors.
    """

    methods: Mapping[str, Callable[[QuantisationKeys], Quantisation]]
    schemes: tuple[str, ...]
    tensors: str
    scale_suffixes: tuple[str, ...] = ()
    scale_dtype: str | None = None


@cache
def weight_formats() -> dict[str, WeightFormat]:
    """Return the formats by the names of their folders."""
    names = sorted(module.name for module in pkgutil.iter_modules(import_module(FOLDER).__path__))
    return {name: import_module(f"{FOLDER}.{name}").FORMAT for name in names}


def find_format(scheme: str) -> WeightFormat:
    """Return the format that has a scheme."""
    return next(one for one in weight_formats().values() if scheme in one.schemes)
