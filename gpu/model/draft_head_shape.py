"""Read a checkpoint's draft head, which guesses one more token (multi-token prediction): a layer behind all others.

Qwen3-Next and Qwen3.5 have one. It takes the normed hidden state of a token and the embedding of the next token, norms
each, and joins them, embedding first. A matrix turns this into the input of one attention layer. A norm of its own and
the model's output matrix give the token after the next (DeepSeek-V3's report, arXiv 2412.19437, section 2.2, has the
idea, with the other order). Its tensors are `mtp. ...`.
"""

from dataclasses import replace

from gpu.model.spec import Architecture, ModelError
from transfer.arrays import FLOATS, ArraySpec

RECENT = 32  # hidden states kept for each slot, by cell: more than the rows that a slot has in a step
PREFIXES = ("mtp.", "model.mtp.")  # prefixes of its tensors' names
MARK = "mtp.fc.weight"  # a tensor that every checkpoint with a draft head has
TENSORS = {
    MARK: "mix",
    "mtp.pre_fc_norm_embedding.weight": "embedding_norm",
    "mtp.pre_fc_norm_hidden.weight": "hidden_norm",
    "mtp.norm.weight": "norm",
}
GGUF_TENSORS = {
    MARK: "eh_proj.weight",
    "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
    "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
    "mtp.norm.weight": "shared_head_norm.weight",
    "mtp.embed_tokens.weight": "embed_tokens.weight",  # which the model's own are where a file has none
    "mtp.shared_head.head.weight": "shared_head_head.weight",
}
"""What llama.cpp calls its tensors, behind the name of its layer, the first behind the model's, and `nextn.`"""


def with_draft_head(shape: Architecture) -> Architecture:
    """Return a shape with the draft head as its last layer; unchanged if it has it already. Raises ModelError if the
    checkpoint has no head, or several.
    """
    if shape.draft_layers:
        return shape
    if shape.draft_heads != 1:
        has = f"has {shape.draft_heads} heads" if shape.draft_heads else "has no head"
        raise ModelError(f"draft: mtp: {shape.name} {has} that guess tokens; want a checkpoint with one, or `ngram`")
    own = next(spec for spec in reversed(shape.layers) if spec.seen_tokens is None)
    return replace(shape, num_layers=shape.num_layers + 1, layer_pattern=(*shape.layers, own), draft_layers=1)


def without_draft_head(shape: Architecture) -> Architecture:
    """Return a shape without the draft head's layer."""
    pattern = shape.layers[: shape.main_layers] if shape.draft_layers else shape.layer_pattern
    return replace(shape, num_layers=shape.main_layers, layer_pattern=pattern, draft_layers=0)


def head_arrays(shape: Architecture, slots: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return the arrays that a head keeps for each slot, and for padding rows: normed hidden states by cell, the
    model's and its own.
    """
    rows = ArraySpec(((slots + 1) * RECENT, shape.hidden), FLOATS[dtype_bytes])
    return {"recent": rows, "guessed": rows}


def name_of_head(name: str) -> str | None:
    """Return a checkpoint's name of one of the head's tensors as TENSORS has it; None: it is not the head's."""
    own = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return None if own is None else PREFIXES[0] + name.removeprefix(own)
