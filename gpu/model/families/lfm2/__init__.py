"""LFM2: short convolutions with gates in most layers, and grouped attention with norms of heads in the others."""

from functools import partial

from gpu.model.config_keys import ConfigKeys
from gpu.model.family import Family, parse_sizes
from gpu.model.gguf.header import shown
from gpu.model.published_sizes import published_sizes
from gpu.model.spec import Architecture, LayerSpec, ModelError, Recurrent

_CONV, _ATTENDS = "conv", "full_attention"
_MOST_TAPS = 4
_TENSORS = {
    "operator_norm.weight": "attention_norm",
    "self_attn.q_proj.weight": "query",
    "self_attn.k_proj.weight": "key",
    "self_attn.v_proj.weight": "value",
    "self_attn.out_proj.weight": "output",
    "self_attn.q_layernorm.weight": "query_norm",
    "self_attn.k_layernorm.weight": "key_norm",
    "conv.in_proj.weight": "mixed_all",
    "conv.conv.weight": "conv",
    "conv.out_proj.weight": "mixed_output",
    "ffn_norm.weight": "mlp_norm",
    "feed_forward.w1.weight": "gate",
    "feed_forward.w3.weight": "up",
    "feed_forward.w2.weight": "down",
}


def parse(keys: ConfigKeys, name: str) -> Architecture:
    keys.only("conv_bias", False)
    hidden, taps = keys.positive("hidden_size", int), keys.positive("conv_L_cache", int)
    if not 2 <= taps <= _MOST_TAPS:
        raise ModelError(f"model: {keys.source}: conv_L_cache is {taps}; served: 2 to {_MOST_TAPS}")
    short = Recurrent(1, 1, 0, hidden, taps, kind="short_conv")
    specs = [LayerSpec(recurrent=short) if one else LayerSpec(qk_norm=True) for one in _find_convolutions(keys)]
    eps = float(keys.positive("norm_eps", float))
    return parse_sizes(
        keys, name, specs, intermediate=_intermediate(keys), rms_norm_eps=eps, tied_embeddings=_ties(keys)
    )


def _find_convolutions(keys: ConfigKeys) -> list[bool]:
    """Return which layers are convolutions: as `layer_types` says, else all but those of `full_attn_idxs`."""
    num_layers = keys.positive("num_hidden_layers", int)
    types, attending = keys.get("layer_types"), keys.get("full_attn_idxs")
    if types is None:
        if not isinstance(attending, list) or any(
            type(one) is not int or not 0 <= one < num_layers for one in attending
        ):
            raise ModelError(
                f"model: {keys.source}: full_attn_idxs is {shown(attending)}; wanted numbers of layers from 0 to "
                f"{num_layers - 1}"
            )
        types = [_ATTENDS if layer in attending else _CONV for layer in range(num_layers)]
    known = (_CONV, _ATTENDS)
    if not isinstance(types, list) or len(types) != num_layers or any(one not in known for one in types):
        wanted = f"{num_layers} of {', '.join(map(repr, known))}"
        raise ModelError(f"model: {keys.source}: layer_types is {shown(types)}; wanted {wanted}")
    if _CONV not in types or _ATTENDS not in types:
        raise ModelError(f"model: {keys.source}: layer_types has {shown(sorted({*types}))} alone; wanted both kinds")
    return [one == _CONV for one in types]


def _intermediate(keys: ConfigKeys) -> int:
    """Return an MLP's columns: two thirds of what the file says, times a factor, in whole multiples."""
    width = keys.optional("block_ff_dim", int) or keys.positive("intermediate_size", int)
    adjusts, factor = keys.flag("block_auto_adjust_ff_dim"), keys.optional("block_ffn_dim_multiplier", float)
    multiple = keys.positive("block_multiple_of", int)
    if not adjusts:
        return int(width)
    width = int(2 * width / 3)
    return width if factor is None else -(-int(factor * width) // multiple) * int(multiple)


def _ties(keys: ConfigKeys) -> bool:
    older = keys.get("tie_embedding")  # as the first files have it
    return keys.flag("tie_word_embeddings") if older is None else keys.flag("tie_embedding")


_ATTENDING = {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}

_shape = partial(published_sizes, model_type="lfm2")
SHAPES = {
    "tiny-lfm2": _shape(
        256, 512, 4, 4, 2, 1024, 128_000, 1_000_000.0, full_attn_idxs=[1, 3], block_auto_adjust_ff_dim=False,
        tie_word_embeddings=False,
    ),
    "lfm2-1.2b": _shape(2048, 12_288, 16, 32, 8, 65_536, 128_000, 1_000_000.0, tie_word_embeddings=True, **_ATTENDING),
    "lfm2-2.6b": _shape(
        2048, 10_752, 30, 32, 8, 65_536, 128_000, 1_000_000.0, tie_word_embeddings=True,
        full_attn_idxs=[2, 5, 9, 13, 17, 21, 24, 27], block_auto_adjust_ff_dim=False,
    ),
}  # fmt: skip

FAMILY = Family(
    model_types=("lfm2",),
    parse=parse,
    tensors=lambda shape: _TENSORS,
    defaults={
        "block_auto_adjust_ff_dim": True,
        "block_ffn_dim_multiplier": 1.0,
        "block_multiple_of": 256,
        "conv_L_cache": 3,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "max_position_embeddings": 128_000,
        "norm_eps": 1e-5,
        "num_attention_heads": 32,
        "num_hidden_layers": 32,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "tie_word_embeddings": True,
        "vocab_size": 65_536,
    },
    prefixes=(("model.embedding_norm.", "model.norm."),),
    shapes=SHAPES,
)
