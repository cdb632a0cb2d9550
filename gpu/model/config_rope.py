"""Read rotary scaling from `config.json`, in both of its layouts, and the number of positions that it gives.

A setting that its kind of scaling does not have is refused by name.
"""

from collections.abc import Mapping
from typing import Any

from gpu.model.config_keys import ConfigKeys
from gpu.model.spec import ROPE_TYPES, ModelError, RopeScaling

_SETTINGS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("factor", "attention_factor", "long_factor", "short_factor"),
    "proportional": ("factor", "partial_rotary_factor"),
}
_ORIGINAL = "original_max_position_embeddings"  # may stand beside any kind


def parse_rope(keys: ConfigKeys) -> tuple[RopeScaling, int]:
    """Return the model's scaling and its positions: from `rope_theta` beside `rope_scaling` (to transformers 4), or
    from `rope_parameters` (from 5 on). YaRN reaches `factor` times its original positions, whatever a file says of
    them.
    """
    max_positions = keys.positive("max_position_embeddings", int)
    given = keys.get("rope_scaling") or keys.get("rope_parameters") or {}
    keys.get("rope_parameters")
    rope = make_rope(given, keys.get("rope_theta"), max_positions, keys.source)
    if rope.kind == "yarn" and isinstance(rope.settings.get("factor"), int | float):
        max_positions = max(max_positions, int(rope.settings["factor"] * rope.settings[_ORIGINAL]))
    return rope, max_positions


def make_rope(given: Mapping[str, Any], theta: float | None, max_positions: int, source: str) -> RopeScaling:
    """Return the scaling of `given`, the object of a configuration. theta: where it does not say. Its family reads
    `partial_rotary_factor` beside it. Raises ModelError for a kind that is not served and a setting that it does not
    have.
    """
    if not isinstance(given, Mapping):
        raise ModelError(f"model: {source}: rope_scaling is {given!r}; wanted an object")
    settings = {key: value for key, value in given.items() if value is not None}
    kind = settings.pop("rope_type", None) or settings.get("type") or "default"
    settings.pop("type", None)
    if kind != "proportional":
        settings.pop("partial_rotary_factor", None)
    theta = settings.pop("rope_theta", theta)
    if kind not in ROPE_TYPES:
        raise ModelError(f"model: {source}: rope scaling {kind!r}; served: {', '.join(ROPE_TYPES)}")
    for key in settings:
        if key not in _SETTINGS[kind] and key != _ORIGINAL:
            raise ModelError(f"model: {source}: rope scaling {kind!r} has {key}; known: {', '.join(_SETTINGS[kind])}")
    if kind in ("yarn", "longrope"):
        settings.setdefault(_ORIGINAL, max_positions)
    if isinstance(theta, bool) or not isinstance(theta, int | float) or theta <= 0:
        raise ModelError(f"model: {source}: rope_theta is {theta!r}; wanted a positive number")
    return RopeScaling(str(kind), float(theta), settings)


def rotary_share(keys: ConfigKeys) -> float:
    """Return `partial_rotary_factor`, beside the scaling or in it. Raises ModelError for what is no share."""
    share = keys.get("partial_rotary_factor")
    share = 1.0 if share is None else share
    for place in ("rope_scaling", "rope_parameters"):
        given = keys.get(place)
        if isinstance(given, Mapping) and given.get("partial_rotary_factor") is not None:
            share = given["partial_rotary_factor"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise ModelError(f"model: {keys.source}: partial_rotary_factor is {share!r}; wanted a share of a head")
    return float(share)


def with_rope(config: Mapping[str, Any], rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with `rope`, what `model.rope` says, in place of its own scaling, and of base and
    positions where it names them. `dynamic` stretches beyond the file's own positions, to those that `rope` names.
    """
    scaling = dict(rope)
    beside = {key: scaling.pop(key) for key in ("rope_theta", "max_position_embeddings") if key in scaling}
    if scaling.get("rope_type", scaling.get("type")) == "dynamic" and "max_position_embeddings" in config:
        scaling.setdefault(_ORIGINAL, config["max_position_embeddings"])
    known = config.get("rope_parameters")
    if isinstance(known, Mapping):
        whole = known.get("full_attention", known)
        beside = {key: whole[key] for key in ("rope_theta", "partial_rotary_factor") if key in whole} | beside
        if "sliding_attention" in known:
            beside = {"rope_local_base_freq": known["sliding_attention"].get("rope_theta")} | beside
    without = {key: value for key, value in config.items() if key != "rope_parameters"}
    return without | beside | {"rope_scaling": scaling}
