"""Read the keys of one `config.json` for a family.

Every key is read, harmless (listed as such, or unknown to the code that computes the model), empty, or refused by name.
"""

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from gpu.model.gguf.header import shown
from gpu.model.library_keys import read_library_keys
from gpu.model.spec import ModelError

# What decoding does not depend on, although transformers names it: how a model was trained, saved and is run.
HARMLESS = frozenset(
    (
        "_attn_implementation", "_name_or_path", "attention_dropout", "auto_map", "initializer_range",
        "max_sequence_length", "model_type", "task_specific_params", "tokenizer_class", "unsloth_fixed",
        "unsloth_version",
    )
)  # fmt: skip
# What configurations of transformers 4 had beside the keys of 5, for other heads, training and bookkeeping.
_OLDER = frozenset(
    (
        "_attn_implementation_autoset", "add_cross_attention", "cross_attention_hidden_size", "finetuning_task",
        "gradient_checkpointing", "is_decoder", "prefix", "pruned_heads", "tf_legacy_loss", "tie_encoder_decoder",
        "torchscript", "use_bfloat16",
    )
)  # fmt: skip

_MOST_INT = 2**31 - 1
# Something is made for each of these before the files' tensors are looked at: a few times what any published model has.
_MOST_OF = dict.fromkeys(("num_hidden_layers", "num_experts", "num_local_experts"), 1024)


class ConfigKeys:
    """The keys of one configuration. defaults: what absent keys mean; source: names the file in errors."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any], source: str) -> None:
        self._config, self._defaults, self.source = config, defaults, source
        self._read: set[str] = set()

    def __contains__(self, key: str) -> bool:
        """Return whether the key is there, and not null."""
        return self._config.get(key) is not None

    def get(self, key: str) -> Any:
        """Return the key's value, or the family's default if it is absent, or None."""
        self._read.add(key)
        return self._config.get(key, self._defaults.get(key))

    def positive(self, key: str, kind: type) -> Any:
        value = self.get(key)
        if not _is_positive(value, kind):
            raise ModelError(f"model: {self.source}: {key} is {_short(value)}; wanted a positive {kind.__name__}")
        most = sys.float_info.max if kind is float else _MOST_OF.get(key, _MOST_INT)
        if value > most:
            raise ModelError(f"model: {self.source}: {key} is {_short(value)}; wanted {most:,} at most")
        return value

    def optional(self, key: str, kind: type) -> Any:
        """Return the key's value as `positive` does, or None if it is absent, null or 0."""
        value = self.get(key)
        return None if value is None or (value == 0 and not isinstance(value, bool)) else self.positive(key, kind)

    def flag(self, key: str) -> bool:
        value = self.get(key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"model: {self.source}: {key} is {value!r}; wanted true or false")
        return bool(value)

    def only(self, key: str, *served: Any) -> Any:
        """Return the key's value, which must be one of `served`. If it is absent or null, the family's default or the
        first of these is used. Raises ModelError for another value.
        """
        value = self.get(key)
        if value is None:
            value = self._defaults.get(key, served[0])
        if value not in served:
            raise ModelError(f"model: {self.source}: {key} is {value!r}; served: {', '.join(map(repr, served))}")
        return value

    def token_ids(self, key: str) -> tuple[int, ...]:
        return as_ids(key, self._config.get(key), self.source)

    def refuse_unread(self, named: Collection[str] | None, harmless: Collection[str], ignored: Sequence[str]) -> None:
        """Raise ModelError for the first key that is neither read, harmless, empty nor `ignored`.

        named: the keys that transformers' code for the model names: any other one is harmless; None: the model may be
        computed by other code, and only what is known to be harmless is.
        """
        passed = {*self._read, *HARMLESS, *_OLDER, *read_library_keys()["own"], *harmless, *ignored}
        for key, value in self._config.items():
            if key in passed or value is None or (named is not None and key not in named):
                continue
            raise ModelError(
                f"model: {self.source}: {key} is {_short(value)}, and this key is not known; if the model "
                f"computes the same without it, name it in model.ignore_config_keys"
            )


def _is_positive(value: Any, kind: type) -> bool:
    kinds = (int, float) if kind is float else (kind,)
    return isinstance(value, kinds) and not isinstance(value, bool) and value > 0


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def as_ids(key: str, value: Any, source: str) -> tuple[int, ...]:
    """Return the ids of a key like `eos_token_id`, which is a number, a list of them, or null. source: names the file
    in errors. Raises ModelError for anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [one for one in ids if type(one) is not int]
    if wrong:
        raise ModelError(f"model: {source}: {key} is {shown(wrong[0])}; wanted the id of a token, or a list of them")
    return tuple(ids)
