"""gpt-oss in GGUF files: each expert's gate and up are apart there."""

from typing import Any

from gpu.model.gguf.keys import GgufForm, GgufKeys


def translate(keys: GgufKeys, config: dict[str, Any]) -> dict[str, Any]:
    """Add what files do not state: the bounds of YaRN's ramp are not rounded to whole dimensions."""
    size = keys.size("expert_feed_forward_length", 1)
    found: dict[str, Any] = {} if size is None else {"intermediate_size": size}
    scaling = config.get("rope_scaling", {})
    return found | ({"rope_scaling": scaling | {"truncate": False}} if scaling.get("rope_type") == "yarn" else {})


GGUF = GgufForm(
    "gpt-oss", translate=translate, has_experts=True, has_windows=True,
    end_tokens=frozenset({"<|return|>", "<|call|>"}), inner_tokens=frozenset({"<|end|>"}),
)  # fmt: skip
