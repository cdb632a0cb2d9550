"""Prefill so that one query of several attends to everything, and the others to the key blocks that it chose.

MOMO ("Measure Once, Mask Once: Delta Refined Block Sparse Attention"). Its output is corrected by a difference (eq. 2).
So it is not a softmax over a set of tokens, and cannot be merged with another partial.
"""

from typing import Any

from gpu.methods.method import Method
from gpu.methods.momo.settings import MomoSettings


class Momo(Method):
    name = "momo"
    summary = "Prefill reads everything for one query of 16, and for the others the key blocks that these found."
    slot = "prefill"
    settings = MomoSettings
    kv_settings = {
        "gamma": "gamma",
        "block": "key_block",
        "queries": "query_block",
        "k": "k",
        "trim": "k_trim",
        "dense": "dense_until_tokens",
        "layers": "dense_layers",
    }
    prefill_side = "gpu.methods.momo.query_blocks"
    has_mass = False
    measured = (
        "not judged where it begins by default: no pretrained model at hand is so long. From 2,048 tokens on "
        "it loses 2.1 points (3.5 to 0.8) on SmolLM2-135M-Instruct at 8,000"
    )
    cpu_time = "53 s for a prompt of 3,072 tokens (dense: 29)"

    def align_tokens(self, settings: Any) -> int:
        """Return the query block, because query blocks and windows begin at absolute positions."""
        return settings.query_block


METHOD = Momo()
