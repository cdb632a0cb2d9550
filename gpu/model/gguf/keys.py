"""Read the keys of one architecture in a GGUF file's metadata, and how a family's files differ from others."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gpu.model.gguf.file import GgufFile
from gpu.model.gguf.header import shown
from gpu.model.spec import ModelError

HEADS = "nextn_predict_layers"
OF_LAYER = re.compile(r"blk\.(\d{1,6})\.")
OF_HEAD = re.compile(r"blk\.(\d{1,6})\.nextn\.")
_OF_EXPERT = re.compile(r"blk\.\d+\.ffn_(?:gate|up|down)\.(\d{1,6})\.weight")  # of one, as files had them first
_OF_ALL_EXPERTS = "_exps.weight"
# Values that change nothing, since every model served here computes so.
_WITHOUT_EFFECT = {
    "attention.causal": (True,),
    "expert_count": (0,),
    "expert_used_count": (0,),
    "use_parallel_residual": (False,),
    "attention.max_alibi_bias": (0.0,),
    "attention.clamp_kqv": (0.0,),
    "attention.sliding_window": (0,),
    "rope.scaling.finetuned": (True, False),
    "tensor_data_layout": ("Meta AI original pth",),
    "pooling_type": (0, 1, 2, 3, 4),  # `server.service.vector_settings` reads it
}


class GgufKeys:
    """The keys of one architecture, each of which is taken once. Errors name the file and the key."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        """Take an architecture's keys. Raises ModelError if metadata and tensors differ in the number of layers."""
        self.file, self.path, self.prefix = file, file.path, architecture + "."
        self.num_layers = _count_layers(file, self.prefix + "block_count")
        self._left = {
            key.removeprefix(self.prefix): value for key, value in file.metadata.items() if key.startswith(self.prefix)
        }

    def take(self, key: str, absent: Any = None) -> Any:
        """Return a value as it is, a float as it was meant (1e-5). Raises ModelError for a float beyond float32."""
        value = self._left.pop(key, absent)
        if isinstance(value, float) and abs(value) > float(np.finfo(np.float32).max):
            raise self.refused(key, value, "a number that float32 holds")
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def word(self, key: str, absent: str) -> str:
        """Return a text. Raises ModelError for anything else."""
        value = self.take(key, absent)
        if not isinstance(value, str):
            raise self.refused(key, value, "a text")
        return value

    def size(self, key: str, least: int) -> int | None:
        """Return a count of `least` or more; None: the file does not say. Raises ModelError for anything else."""
        value = self.number(key)
        if value is not None and (not isinstance(value, int) or value < least):
            raise self.refused(key, value, f"a whole number of {least} or more")
        return value

    def positive(self, key: str) -> int:
        """Return a count of 1 or more, which the file must have. Raises ModelError."""
        value = self.size(key, 1)
        if value is None:
            raise self.refused(key, value, "a whole number of 1 or more")
        return value

    def count_heads(self) -> int:
        """Return how many of the last layers guess further tokens, in place of going through the decoder.

        Raises ModelError where no other is left, and where these are not the layers that have a head's tensors.
        """
        count = self.size(HEADS, 0) or 0
        if count >= self.num_layers:
            raise self.refused(HEADS, count, f"less than {self.num_layers}, all layers that the file has tensors of")
        found = sorted({int(one[1]) for name in self.file.tensors if (one := OF_HEAD.match(name))})
        if found != list(range(self.num_layers - count, self.num_layers)):
            listed = ", ".join(map(str, found)) or "no layer"
            wanted = f"as many as the last layers with tensors of a head, and these are of {listed}"
            raise self.refused(HEADS, count, wanted)
        return count

    def positive_of_some(self, key: str) -> int:
        """Return a count of 1 or more: a file has one number, or one a layer, 0 for layers that have none of it.

        Raises ModelError for anything else, and where layers differ.
        """
        given = self.take(key)
        found = {one for one in given if one} if isinstance(given, list) else {given}
        (count,) = found if len(found) == 1 else (None,)
        if type(count) is not int or count < 1:
            raise self.refused(key, given, "a positive number, the same in all layers that have one")
        return count

    def number(self, key: str, absent: Any = None) -> Any:
        """Return a number of 0 or more, or `absent`. A list that has the same number for every layer is that number.

        Raises ModelError for anything else.
        """
        return self._as_number(key, self.take(key, absent))

    def has(self, key: str) -> bool:
        """Return whether a number stands there and is not 0, without taking it. Raises ModelError for no number."""
        return bool(self._as_number(key, self._left.get(key)))

    def count_experts(self) -> int:
        """Return how many experts a layer has tensors of."""
        stacked = [tensor.shape[0] for name, tensor in self.file.tensors.items() if name.endswith(_OF_ALL_EXPERTS)]
        single = [int(found[1]) + 1 for name in self.file.tensors if (found := _OF_EXPERT.fullmatch(name))]
        return max(stacked + single, default=0)

    def left(self) -> dict[str, Any]:
        """Return what nobody has taken, by whole names, without values that change nothing."""
        return {
            self.prefix + key: value
            for key, value in self._left.items()
            if key not in _WITHOUT_EFFECT or value not in _WITHOUT_EFFECT[key]
        }

    def refused(self, key: str, value: Any, wanted: str) -> ModelError:
        """Return the error for a value that is not served."""
        return ModelError(f"model: {self.path}: {self.prefix}{key} is {shown(value)}; wanted {wanted}")

    def _as_number(self, key: str, value: Any) -> Any:
        if isinstance(value, list):
            if len(value) != self.num_layers or len(set(value)) != 1:
                raise self.refused(key, value, "a number, or the same one for each layer")
            value = value[0]
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < 0):
            raise self.refused(key, value, "a number")
        return value


def read_window_layers(keys: GgufKeys, config: dict[str, Any], period: int) -> dict[str, Any]:
    """Return `layer_types`: which layers have a window, as the file says, or of so many one has none. period: how many,
    where it does not say. Raises ModelError.
    """
    types, every = config.get("layer_types"), config.get("sliding_window_pattern", period)
    if types is None and (type(every) is not int or every < 1):
        raise keys.refused("attention.sliding_window_pattern", every, "a whole number of 1 or more")
    if types is None:
        types = [
            "full_attention" if (layer + 1) % every == 0 else "sliding_attention" for layer in range(keys.num_layers)
        ]
    if len(types) != keys.num_layers:
        raise keys.refused("attention.sliding_window_pattern", types, "one entry for each layer")
    return {"layer_types": types, "sliding_window_pattern": None}


def _count_layers(file: GgufFile, key: str) -> int:
    """Return how many layers the file has tensors of, which its metadata must state as well. Raises ModelError.

    It comes first: a file that claims a billion layers is refused before anything is made for each.
    """
    numbers = {int(found[1]) for name in file.tensors if (found := OF_LAYER.match(name))}
    stated, num_layers = file.metadata.get(key), max(numbers, default=-1) + 1
    if stated is not None and (isinstance(stated, bool) or stated != num_layers):
        raise ModelError(f"model: {file.path}: {key} is {shown(stated)}; the file has tensors of {num_layers} layers")
    return num_layers


def _no_keys(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    return {}


@dataclass(frozen=True, slots=True)
class GgufForm:
    """How llama.cpp writes the files of a family.

    architecture: `general.architecture`.
    others: that it may be as well.
    claims: whether a file of that architecture is of this family; None: it is where no other family claims it.
    translate: returns keys of `config.json` from the file's keys and from those that all families have (`as_config`);
        it wins where both have one.
    has_experts, has_windows: whether its layers have; None: as a file says.
    has_neighbour_pairs: rows of queries and keys are in the order in which neighbours are rotated together.
    end_tokens: control tokens that end its turns and no other family's.
    inner_tokens: those that end other families' turns and not its own.
    merges_by_id: tokens are merged in the order of their ids.
    listed: keys of `as_config` that `translate` reads in its place, since they have a number for each layer, or another
        meaning.
    own_names: of a layer's tensors that `gguf` does not know.
    tensor_names: the architecture of the `gguf` package whose names its tensors have; None: its own.
    read_before: ends of names of tensors that `translate` reads, and no layer.
    """

    architecture: str
    others: tuple[str, ...] = ()
    claims: Callable[[GgufKeys], bool] | None = None
    translate: Callable[[GgufKeys, dict[str, Any]], dict[str, Any]] = _no_keys
    has_experts: bool | None = False
    has_windows: bool = False
    has_neighbour_pairs: bool = False
    end_tokens: frozenset[str] = frozenset()
    inner_tokens: frozenset[str] = frozenset()
    merges_by_id: bool = False
    tensor_names: str | None = None
    listed: tuple[str, ...] = ()
    own_names: Mapping[str, str] = field(default_factory=dict)
    read_before: tuple[str, ...] = ()

    @property
    def architectures(self) -> tuple[str, ...]:
        return (self.architecture, *self.others)
