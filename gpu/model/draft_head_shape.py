"""A head that comes with a checkpoint and guesses a further token (multi-token prediction): a layer behind the others.

Qwen3-Next and Qwen3.5 have one: of the normed hidden state of a token, and the embedding of the token behind it, each
normed once more and joined, embedding first, a matrix makes what one layer of attention takes; a norm of its own, and
the model's output matrix, say which token comes then (DeepSeek-V3's report, arXiv 2412.19437, section 2.2, has the idea
and the other order). Its tensors are `mtp. ...`.
"""

from dataclasses import replace

from gpu.model.spec import Architecture, ModelError
from transfer.arrays import FLOATS, ArraySpec

RECENT = 32  # hidden states of a slot that are kept, by cell: more than a step has rows of it
PREFIXES = ("mtp.", "model.mtp.")  # of its tensors
MARK = "mtp.fc.weight"  # that a checkpoint with one has
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
    """Return a shape with the head as its last layer, or as it is where it has that already. Raises ModelError where
    the checkpoint has none.
    """
    if shape.draft_layers:
        return shape
    if shape.draft_heads != 1:
        has = f"has {shape.draft_heads} heads" if shape.draft_heads else "has no head"
        raise ModelError(f"draft: mtp: {shape.name} {has} that guess tokens; want a checkpoint with one, or `ngram`")
    own = next(spec for spec in reversed(shape.layers) if spec.seen_tokens is None)
    return replace(shape, num_layers=shape.num_layers + 1, layer_pattern=(*shape.layers, own), draft_layers=1)


def without_draft_head(shape: Architecture) -> Architecture:
    """Return a shape of the layers that each token goes through."""
    pattern = shape.layers[: shape.main_layers] if shape.draft_layers else shape.layer_pattern
    return replace(shape, num_layers=shape.main_layers, layer_pattern=pattern, draft_layers=0)


def head_arrays(shape: Architecture, slots: int, dtype_bytes: int) -> dict[str, ArraySpec]:
    """Return what a head keeps of each slot, and of padding rows: normed hidden states by cell, the model's and its
    own.
    """
    rows = ArraySpec(((slots + 1) * RECENT, shape.hidden), FLOATS[dtype_bytes])
    return {"recent": rows, "guessed": rows}


def name_of_head(name: str) -> str | None:
    """Return a checkpoint's name of one of the head's tensors as TENSORS has it; None: it is not the head's."""
    own = next((prefix for prefix in PREFIXES if name.startswith(prefix)), None)
    return None if own is None else PREFIXES[0] + name.removeprefix(own)
