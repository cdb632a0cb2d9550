"""Define the settings of AttentionPredictor in serving. No torch: the plan and the server's process read them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from pydantic import Field

from gpu.model.architecture import Architecture
from transfer.settings_model import Settings
from transfer.tier_shape import BLOCK_TOKENS


class PredictedSettings(Settings):
    """Settings of AttentionPredictor.

    In the paper's terms: history = H (64), calibrate_every = M (5), predict_every 1.

    The paper's block b is BLOCK_TOKENS.
    """

    renamed: ClassVar[Mapping[str, str]] = {"calibration": "look_stride_blocks"}
    weights: Path = Field(description="the predictor: `.safetensors` of `tandem train predictor`, or the authors' .pth")
    budget_tokens: int = Field(2048, ge=32, le=4096, multiple_of=BLOCK_TOKENS, description="tokens of a context's "
                               "middle that a KV head reads at each step; 512 to 4096 are usual")  # fmt: skip
    history: int = Field(16, ge=5, le=256, description="earlier steps that the predictor looks at")
    predict_every: int = Field(4, ge=1, le=BLOCK_TOKENS, description="steps between two predictions of a layer, which "
                               "keeps its blocks in between; layers take turns")  # fmt: skip
    look_stride_blocks: int = Field(256, ge=0, description="in each step one block in so many, in turn, is scored "
                                    "anew by its keys in host memory; 0: none")  # fmt: skip
    calibrate_every: int = Field(0, ge=0, description="one step in so many attends to everything and records it in the "
                                 "history; if the rest is sampled, the answer does not use it; 0: never")  # fmt: skip
    sink_tokens: int = Field(16, ge=1, le=1024, description="tokens in front that are always read, unless the host "
                             "section has more")  # fmt: skip
    local_tokens: int = Field(64, ge=1, le=4096, description="tokens at the end that are always read, likewise")
    exempt_layers: int = Field(
        2, ge=0, description="first layers, whose contexts stay on the device and are read in full"
    )
    min_context_tokens: int = Field(4096, ge=0, description="no blocks are predicted for a shorter prompt and "
                                    "answer together")  # fmt: skip
    rings: int | None = Field(None, ge=1, description="sequences of the profile that run at once; default: what an "
                              "eighth of the memory beside the weights holds, at least one")  # fmt: skip

    @property
    def num_rows(self) -> int:
        """Return the rows of a history: those that a prediction reads, and one for each step between predictions."""
        return self.history + self.predict_every

    @property
    def leaves_late(self) -> bool:
        """Return whether a step does not wait for blocks that have not come by its end."""
        return False

    @property
    def num_slots(self) -> int:
        """Return the number of blocks that a KV head reads."""
        return self.budget_tokens // BLOCK_TOKENS

    def layers(self, architecture: Architecture) -> list[int]:
        """Return the layers that may predict: all but the exempt ones and those with a window, which are never
        offloaded.
        """
        windows = set(architecture.layers_apart)
        return [layer for layer in range(self.exempt_layers, architecture.num_layers) if layer not in windows]


# The defaults, by name; `weights` has none.
SERVED: dict[str, Any] = {name: field.default for name, field in PredictedSettings.model_fields.items()}
