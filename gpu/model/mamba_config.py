"""Read Mamba-2 layers from a `config.json`, in the words of either family that has them."""

from gpu.model.config_keys import ConfigKeys
from gpu.model.gguf.header import shown
from gpu.model.spec import ModelError, Recurrent

_MOST_TAPS = 4
# Of a layer's tensors, behind the name of its mixer, and what of `weights.LayerWeights` each of them is.
_TENSORS = {
    "in_proj.weight": "mixed_all",
    "conv1d.weight": "conv",
    "conv1d.bias": "conv_bias",
    "A_log": "decay",
    "dt_bias": "time_bias",
    "D": "skip",
    "norm.weight": "mixed_norm",
    "out_proj.weight": "mixed_output",
}


def mamba_tensors(mixer: str) -> dict[str, str]:
    """Return where the tensors of a Mamba-2 layer go, as `family.LAYER_TENSORS`. mixer: what their names begin with."""
    return {f"{mixer}.{name}": what for name, what in _TENSORS.items()}


def parse_mamba(keys: ConfigKeys, names: tuple[str, str, str, str], dim: int, eps: float) -> Recurrent:
    """Return a Mamba-2 layer. names: of the keys of heads, groups, a state's rows and a convolution's tokens; dim:
    elements of a head; eps: of the norm of its output. Raises ModelError for sizes that are not served, and for steps
    of time with a limit.
    """
    limits = keys.get("time_step_limit")
    listed = limits if isinstance(limits, list) else [limits]
    numbers = [one.get("__float__") if isinstance(one, dict) else one for one in listed]
    if limits is not None and numbers not in ([0, float("inf")], [0, "Infinity"]):  # transformers tags infinities
        raise ModelError(f"model: {keys.source}: time_step_limit is {shown(limits)}; served: [0.0, Infinity]")
    heads, groups, state, taps = (keys.positive(name, int) for name in names)
    if heads % groups:
        raise ModelError(f"model: {keys.source}: {names[0]} is {heads} in {groups}, {names[1]}; wanted a multiple")
    if not 2 <= taps <= _MOST_TAPS:
        raise ModelError(f"model: {keys.source}: {names[3]} is {taps}; served: 2 to {_MOST_TAPS}")
    return Recurrent(groups, heads, state, dim, taps, kind="mamba2", norm_eps=eps)
