"""Read LoRA adapters in PEFT's folders: which rows of which matrices they change. Reads headers, no tensors.

Such a module computes `W x + gain * B (A x)`, with `gain = alpha / rank`, or `alpha / sqrt(rank)` with `use_rslora`
(LoRA, arXiv 2106.09685; rsLoRA, arXiv 2312.03732).
"""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from gpu.model.family import families
from gpu.model.json_files import read_object
from gpu.model.matrix_formats import layer_tensors, matrix_parts, matrix_shapes
from gpu.model.spec import Architecture, LayerSpec, ModelError

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_TENSOR = re.compile(r"base_model\.model\.(.+)\.lora_([AB])(?:\.default)?\.weight")
_OF_LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(.+)")
# Keys of the configuration that change what an adapter computes, and the values at which they do not.
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "use_dora": (None, False), "bias": (None, "none"), "modules_to_save": (None, []), "fan_in_fan_out": (None, False),
    "lora_bias": (None, False), "layer_replication": (None, []), "alora_invocation_tokens": (None, []),
    "trainable_token_indices": (None, [], {}), "target_parameters": (None, []), "use_qalora": (None, False),
}  # fmt: skip
_HASHED_AT_ONCE = 2**24


@dataclass(frozen=True, slots=True)
class AdapterPart:
    """The change of an adapter to rows `[begin, begin + rows)` of a layer's matrix: `gain * up @ down` is added. up and
    down are tensors of its file, `[rows, rank]` and `[rank, inner]`. what: the rows' name in a family's table.
    """

    layer: int
    matrix: str
    what: str
    begin: int
    rows: int
    rank: int
    gain: float
    down: str
    up: str


@dataclass(frozen=True, slots=True)
class AdapterFile:
    """An adapter: its folder, its parts, and the digest of its content."""

    folder: Path
    parts: tuple[AdapterPart, ...]
    digest: str


def read_adapter(folder: Path, architecture: Architecture) -> AdapterFile:
    """Read an adapter's configuration and header. Raises ModelError for an adapter that cannot be served."""
    where = f"adapters: {folder}"
    config = read_object(folder / CONFIG)
    if config is None:
        raise ModelError(f"{where} has no {CONFIG}; wanted a folder that PEFT has saved")
    if config.get("peft_type") != "LORA":
        raise ModelError(f"{where}: peft_type is {config.get('peft_type')!r}; served: 'LORA'")
    for key, neutral in _REFUSED.items():
        if config.get(key) not in neutral:
            raise ModelError(f"{where}: {key} is {config[key]!r}; served: {neutral[-1]!r}")
    shapes = _read_shapes(folder / TENSORS, where)
    parts = []
    for module, (down, up) in _pair(shapes, where).items():
        parts.append(_place(module, down, up, shapes, config, architecture, where))
    if not parts:
        raise ModelError(f"{where}: {TENSORS} holds no tensors; wanted lora_A and lora_B of modules")
    return AdapterFile(folder, tuple(parts), _digest(folder))


def adapter_bytes(files: Sequence[AdapterFile], architecture: Architecture, dtype_bytes: int, most_tokens: int) -> int:
    """Return the bytes of adapters on the device, and of their products for `most_tokens` tokens."""
    if not files:
        return 0
    columns, most_rows = dict[tuple[int, str], int](), dict[tuple[int, str], int]()
    for part in (part for file in files for part in file.parts):
        key = part.layer, part.matrix
        columns[key] = columns.get(key, 0) + part.rank
        most_rows[key] = max(most_rows.get(key, 0), part.rows)
    held = 0
    for (layer, matrix), of_matrix in columns.items():
        inner = matrix_shapes(architecture, architecture.layers[layer])[matrix][1]
        held += of_matrix * ((most_rows[layer, matrix] + inner) * dtype_bytes + 8)
    of_token = (architecture.hidden + max(columns.values())) * dtype_bytes + max(columns.values())
    return held + most_tokens * of_token


def _read_shapes(path: Path, where: str) -> dict[str, tuple[int, ...]]:
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{where}: {TENSORS} cannot be read ({' '.join(str(error).split())})") from None


def _pair(shapes: Mapping[str, tuple[int, ...]], where: str) -> dict[str, tuple[str, str]]:
    """Return the two tensors of each module."""
    found: dict[str, dict[str, str]] = {}
    for name in sorted(shapes):
        matched = _TENSOR.fullmatch(name)
        if matched is None:
            raise ModelError(f"{where}: tensor {name} is none that is served; served: lora_A and lora_B of modules")
        found.setdefault(matched[1], {})[matched[2]] = name
    for module, tensors in found.items():
        if len(tensors) < 2:
            raise ModelError(f"{where}: {module} has lora_{next(iter(tensors))} alone; wanted lora_A and lora_B")
    return {module: (tensors["A"], tensors["B"]) for module, tensors in found.items()}


def _place(
    module: str, down: str, up: str, shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any],
    architecture: Architecture, where: str,
) -> AdapterPart:  # fmt: skip
    """Return the adapter's part for a module. Raises ModelError for a module that the model lacks or that is
    not served.
    """
    canonical = families()[architecture.family].canonical(f"{module}.weight")
    found = None if canonical is None else _OF_LAYER.fullmatch(canonical)
    if found is None or int(found[1]) >= architecture.num_layers:
        raise ModelError(f"{where}: {module} is no matrix of a layer of {architecture.name}")
    layer = int(found[1])
    spec = architecture.layers[layer]
    what = layer_tensors(architecture, spec).get(found[2])
    placed = None if what is None else _find_rows(architecture, spec, what)
    if what is None or placed is None:
        raise ModelError(
            f"{where}: {module} is not served with an adapter; served: q, k, v and o of plain attention, gate, up and "
            "down of an MLP with gates and without experts"
        )
    matrix, begin, rows = placed
    inner = matrix_shapes(architecture, spec)[matrix][1]
    (rank, *rest), got = shapes[down] or (0,), shapes[up]
    if rest != [inner] or got != (rows, rank) or not rank:
        raise ModelError(
            f"{where}: {module} has lora_A {list(shapes[down])} and lora_B {list(got)}; wanted [rank, {inner}] and "
            f"[{rows}, rank]"
        )
    alpha = _alpha(config, module, where)
    gain = alpha / (sqrt(rank) if config.get("use_rslora") else rank)
    return AdapterPart(layer, matrix, what, begin, rows, rank, gain, down, up)


def _find_rows(architecture: Architecture, spec: LayerSpec, what: str) -> tuple[str, int, int] | None:
    """Return the layer's matrix with these rows, their first row, and how many there are. None: adapters of this module
    are not served.
    """
    served = {"qkv", "output"} if architecture.latent is None and spec.attends else set()
    if spec.experts is None and spec.is_gated:
        served |= {"gate_up", "down"}
    for matrix, (all_rows, _) in matrix_shapes(architecture, spec).items():
        if matrix not in served:
            continue
        if what == matrix:
            return matrix, 0, all_rows
        begin = 0
        for part, rows in matrix_parts(architecture, spec, matrix):
            if part == what:
                return matrix, begin, rows
            begin += rows
    return None


def _alpha(config: Mapping[str, Any], module: str, where: str) -> float:
    patterns = config.get("alpha_pattern") or {}
    own = next((value for key, value in patterns.items() if re.fullmatch(rf"(.*\.)?({key})", module)), None)
    alpha = config.get("lora_alpha") if own is None else own
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ModelError(f"{where}: lora_alpha is {alpha!r}; wanted a number")
    return float(alpha)


def _digest(folder: Path) -> str:
    """Return the SHA-256 of an adapter's two files."""
    digest = hashlib.sha256((folder / CONFIG).read_bytes())
    with (folder / TENSORS).open("rb") as file:
        while block := file.read(_HASHED_AT_ONCE):
            digest.update(block)
    return digest.hexdigest()
