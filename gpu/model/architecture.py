"""Read an Architecture from the `config.json` of a Hugging Face folder, a GGUF file, or a named shape.

A key that is not understood is refused by name, unless `ignore_config_keys` names it.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpu.config import ModelConfig
from gpu.model.draft_head_shape import MARK, name_of_head, with_draft_head
from gpu.model.end_tokens import end_token_ids
from gpu.model.family import families, parse_config
from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.gguf.folder import name_gguf_files
from gpu.model.gguf.keys import HEADS
from gpu.model.gguf_translation.config_translation import as_config
from gpu.model.gguf_translation.tensor_names import find_quantisation
from gpu.model.humming_formats import multiplied
from gpu.model.json_files import read_object
from gpu.model.matrix_formats import rounded
from gpu.model.named_shapes import NAMED_SHAPES, named_config, named_shape
from gpu.model.safetensors_index import find_names
from gpu.model.spec import ROPE_TYPES, Architecture, LayerSpec, ModelError, RopeScaling

__all__ = [
    "NAMED_SHAPES", "ROPE_TYPES", "Architecture", "LayerSpec", "ModelError", "RopeScaling", "load_architecture",
    "named_shape", "parse_architecture", "read_architecture",
    "shape_with_rope",
]  # fmt: skip

log = logging.getLogger(__name__)


def load_architecture(model: ModelConfig, drafts: bool = False) -> Architecture:
    """Return the shape of a configured model, with the configured rounding and products. drafts: whether to include the
    checkpoint's draft head. Raises ModelError.
    """
    if model.path is not None:
        shape = read_architecture(model.path, model.rope, model.ignore_config_keys)
    else:
        assert model.random_weights is not None
        shape = shape_with_rope(model.random_weights, model.rope)
    shape = with_draft_head(shape) if drafts else shape
    return multiplied(rounded(shape, model.weights, "model.weights"), model.products, "model.products")


def read_architecture(
    folder: Path, rope: Mapping[str, Any] | None = None, ignored_keys: Sequence[str] = ()
) -> Architecture:
    """Read `folder/config.json`, and the end tokens of the files beside it; of a GGUF file, its metadata.

    rope: `model.rope`, in place of the file's scaling; ignored_keys: `model.ignore_config_keys`. Raises ModelError for
    a missing or broken file, a missing key, or a model that the decoder does not compute.
    """
    if is_gguf(folder):
        return _read_gguf(folder, rope, ignored_keys)
    path = folder / "config.json"
    config = read_object(path)
    if config is None:
        wanted = f"give a Hugging Face folder with config.json{name_gguf_files(folder)}"
        raise ModelError(f"model: {path} is missing; {wanted}")
    shape = parse_architecture(config, folder.resolve().name, str(path), rope, ignored_keys)
    if shape.tied_embeddings and (own := _own_output_matrix(folder, shape)):
        log.warning("weights event=not_tied folder=%s tensor=%s reason='config.json ties it'", folder, own)
        shape = replace(shape, tied_embeddings=False)
    if "experts_gate_up" in families()[shape.family].tensors(shape).values():
        shape = replace(shape, experts_apart=any(".experts.0." in name for name in find_names(folder)))
    if shape.draft_heads and MARK not in map(name_of_head, find_names(folder)):
        shape = replace(shape, draft_heads=0)
    return replace(shape, eos_token_ids=end_token_ids(folder))


def _own_output_matrix(folder: Path, shape: Architecture) -> str | None:
    """Return the name of the output matrix's tensor if the folder has one, or None.

    As in transformers, such a matrix is used even if `config.json` has `tie_word_embeddings`.
    """
    family = families()[shape.family]
    return next((name for name in find_names(folder) if (family.canonical(name) or "").startswith("lm_head.")), None)


def shape_with_rope(name: str, rope: Mapping[str, Any] | None) -> Architecture:
    """Return a named shape, with `model.rope` in place of its own scaling. Raises ModelError."""
    return named_shape(name) if rope is None else parse_architecture(named_config(name), name, name, rope)


def _read_gguf(path: Path, rope: Mapping[str, Any] | None, ignored_keys: Sequence[str]) -> Architecture:
    file = read_gguf(path)
    shape = parse_config(as_config(file), file.name, str(path), ignored_keys, rope, has_other_code=True)
    shape = replace(shape, experts_apart=True)
    heads = file.metadata.get(f"{file.metadata['general.architecture']}.{HEADS}")
    if heads and not shape.draft_heads:
        log.info("model event=heads_left_out file=%s layers=%s reason='%s: of such files they are not read'",
                 path, heads, HEADS)  # fmt: skip
    whole = with_draft_head(shape) if shape.draft_heads == 1 else shape
    return replace(shape, eos_token_ids=end_token_ids(path), quantisation=find_quantisation(file, whole))


def parse_architecture(
    config: dict[str, Any], name: str, source: str, rope: Mapping[str, Any] | None = None,
    ignored_keys: Sequence[str] = (),
) -> Architecture:  # fmt: skip
    """Return an Architecture of a Hugging Face config; `source` names it in errors. See `read_architecture`."""
    return parse_config(config, name, source, ignored_keys, rope)
