"""Find settings of the served model's embeddings and ranking: the deployment's, else those of the model's folder.

If the model does not suit a request, the error names the setting.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu.config import ModelConfig
from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.json_files import read_object
from gpu.model.spec import ModelError
from gpu.pooling import Pooling, PoolingKind
from server.deployment import ConfigError
from server.text.model_tokenizer import Tokenizer

_POOLING_FILE = "1_Pooling/config.json"  # of sentence-transformers
_KINDS: dict[str, PoolingKind] = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean"}


@dataclass(frozen=True, slots=True)
class Ranking:
    """How documents are ranked: by the cosine of embeddings, or by the logits of the two tokens `yes_no`."""

    yes_no: Pooling | None


@dataclass(frozen=True, slots=True)
class Vectors:
    """How embeddings are made.

    embedding: None if the folder's way of pooling is unknown, for the reason `why_not`. ranking: None: there is none.
    is_nested: the first entries of an embedding are an embedding themselves.
    """

    embedding: Pooling | None
    why_not: str
    ranking: Ranking | None
    is_nested: bool


def load_vectors(model: ModelConfig, tokenizer: Tokenizer) -> Vectors:
    """Load the settings.

    Raises ConfigError for a folder that cannot be read, and a vocabulary without the words to rank by.
    """
    kind, why_not = model.pooling or _read_kind(model), ""
    if kind is None:
        why_not = f"{_POOLING_FILE} names a pooling that is not served; set model.pooling to last or mean"
    ranking = None
    if model.ranking is not None:
        ranking = Ranking(_yes_no(tokenizer) if model.ranking == "yes_no" else None)
    return Vectors(None if kind is None else Pooling(kind=kind), why_not, ranking, model.nested_embeddings)


def _read_kind(model: ModelConfig) -> PoolingKind | None:
    """Return how the folder pools; by default the last token, at which a causal model has seen all of the text."""
    if model.path is not None and is_gguf(model.path):
        return _read_gguf_kind(model.path)
    path = None if model.path is None else model.path / _POOLING_FILE
    try:
        tree = None if path is None else read_object(path)
    except ModelError as error:
        raise ConfigError(str(error)) from None
    if tree is None:
        return "last"
    modes = [mode for mode, is_on in tree.items() if mode.startswith("pooling_mode_") and is_on is True]
    return _KINDS.get(modes[0]) if len(modes) == 1 else None


def _read_gguf_kind(path: Path) -> PoolingKind | None:
    """Return how a GGUF file pools, by llama.cpp's numbers: none and the last token, or the mean."""
    try:
        metadata = read_gguf(path).metadata
    except ModelError as error:
        raise ConfigError(str(error)) from None
    kinds: dict[Any, PoolingKind] = {None: "last", 0: "last", 1: "mean", 3: "last"}
    return kinds.get(metadata.get(f"{metadata.get('general.architecture')}.pooling_type"))


def _yes_no(tokenizer: Tokenizer) -> Pooling:
    words = {word: tokenizer.encode(word, add_special_tokens=False) for word in ("yes", "no")}
    for word, token_ids in words.items():
        if len(token_ids) != 1:
            raise ConfigError(
                f"model.ranking: got 'yes_no', but {word!r} is {len(token_ids)} tokens of this vocabulary; wanted one"
            )
    return Pooling(kind="logits", token_ids=tuple(token_ids[0] for token_ids in words.values()))
