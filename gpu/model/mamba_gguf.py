"""Read Mamba-2 layers in GGUF files: the names of their tensors, their sizes, and which layers they are."""

from dataclasses import dataclass

from gpu.model.gguf.keys import GgufKeys

LISTED = ("attention.head_count_kv",)
_NAMES = {
    "in_proj.weight": "ssm_in.weight",
    "conv1d.weight": "ssm_conv1d.weight",
    "conv1d.bias": "ssm_conv1d.bias",
    "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias",
    "D": "ssm_d",
    "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}


@dataclass(frozen=True, slots=True)
class MambaSizes:
    """The sizes of a Mamba-2 layer: heads of `dim` elements, in groups; `state` rows of a head's state; tokens of the
    convolution. inner: elements of all heads.
    """

    heads: int
    groups: int
    dim: int
    state: int
    conv_tokens: int
    inner: int


def mamba_names(mixer: str) -> dict[str, str]:
    """Return what files call a layer's tensors. mixer: what their names in a checkpoint begin with."""
    return {f"{mixer}.{ours}": theirs for ours, theirs in _NAMES.items()}


def read_mamba(keys: GgufKeys) -> MambaSizes:
    """Return the sizes of a file's Mamba-2 layers. Raises ModelError."""
    heads, inner = keys.positive("ssm.time_step_rank"), keys.positive("ssm.inner_size")
    if inner % heads:
        raise keys.refused("ssm.inner_size", inner, f"a multiple of {heads}, ssm.time_step_rank")
    groups, state, taps = (keys.positive(f"ssm.{name}") for name in ("group_count", "state_size", "conv_kernel"))
    return MambaSizes(heads, groups, inner // heads, state, taps, inner)


def is_mamba(keys: GgufKeys, layer: int) -> bool:
    """Return whether a file's layer has a state."""
    return f"blk.{layer}.ssm_a" in keys.file.tensors
