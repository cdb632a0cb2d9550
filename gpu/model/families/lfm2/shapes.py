"""LFM2's published sizes by name, for random weights."""

from typing import Any

from gpu.model.published_sizes import published_sizes

_ATTENDING = {"full_attn_idxs": [2, 5, 8, 10, 12, 14]}


def _shape(*sizes: Any, **more: Any) -> dict[str, Any]:
    return {"model_type": "lfm2"} | published_sizes(*sizes, **more)


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
