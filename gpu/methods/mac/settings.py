"""Define the settings of MAC-Attention. No torch: the plan and the server's process read them.

Invariant: a ring holds every position that can be matched, and every one that is seeded.
"""

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from gpu.model.architecture import Architecture
from transfer.settings_model import Settings

LayerTau = float | Literal["off"]


class MacSettings(Settings):
    """Settings of MAC. In the paper's terms: capacity = K, band = r, tau = τ of eq. (3), and `max_prefix_share: 1`."""

    tau: float = Field(0.45, ge=0, lt=1, description="how near a query must be to an earlier one, 1: equal; 0.45 for "
                       "reading long contexts, 0.75 for writing long answers")  # fmt: skip
    max_prefix_share: float = Field(0.05, gt=0, le=1, description="an earlier query is reused only if its summary "
                                    "held at most this share of its attention; 1: any, as in the paper")  # fmt: skip
    capacity: int = Field(1024, ge=16, le=8192, description="number of earlier queries that are kept and compared")
    band: int = Field(256, ge=1, le=4096, description="tokens in front of a match that are read again")
    sink_tokens: int = Field(4, ge=0, le=1024, description="tokens in front that are always read; with a "
                             "`host` section, rounded up to whole pages")  # fmt: skip
    max_gap: int | None = Field(None, ge=1, description="a match is at most so many positions back; default: capacity")
    min_gap: int = Field(1, ge=1, description="a match is at least so many positions back; with drafts, more than "
                         "a draft has tokens")  # fmt: skip
    max_age: int = Field(4096, ge=1, description="the oldest part of a summary was read at most so many positions back")
    seed_tokens: int | None = Field(
        None, ge=0, description="positions at a prompt's end that can be matched; default: capacity"
    )
    summaries: Literal["float32", "bfloat16"] = Field("bfloat16", description="dtype of stored summaries")
    min_context_tokens: int = Field(4096, ge=0, description="a shorter context is read in full")
    layer_tau: dict[int, LayerTau] = Field(
        {}, description="tau of single layers, or `off`; `tandem tune mac` proposes it"
    )
    stops_matching: bool = Field(True, description="whether a layer that reads more than it saves stops matching for a "
                                 "while; which layers do depends on all requests together")  # fmt: skip
    rings: int | None = Field(None, ge=1, description="sequences of the profile that run at once; default: what an "
                              "eighth of the memory beside the weights holds, at least one")  # fmt: skip

    @field_validator("layer_tau", mode="before")
    @classmethod
    def _read_off(cls, given: Any) -> Any:
        """Read `off`, which YAML parses as false."""
        return {key: "off" if tau is False else tau for key, tau in given.items()} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _check(self) -> "MacSettings":
        for name in ("max_gap", "seed_tokens"):
            asked = getattr(self, name)
            if asked is not None and asked > self.capacity:
                raise ValueError(f"{name} is {asked}; wanted no more than capacity ({self.capacity})")
        if self.min_gap > self.most_gap:
            raise ValueError(f"min_gap is {self.min_gap}; wanted no more than max_gap ({self.most_gap})")
        for layer, tau in self.layer_tau.items():
            if layer < 0 or (tau != "off" and not 0 <= tau < 1):
                raise ValueError(
                    f"layer_tau: layer {layer} has {tau}; wanted a layer's number, and 0 <= tau < 1 or off"
                )
        return self

    @property
    def most_gap(self) -> int:
        return self.capacity if self.max_gap is None else self.max_gap

    @property
    def num_seeds(self) -> int:
        """Return the number of positions at a prompt's end that are seeded."""
        return self.capacity if self.seed_tokens is None else self.seed_tokens

    def layers(self, architecture: Architecture) -> list[int]:
        """Return the layers that match: all but those that are off and those with a window, which read
        little anyway.
        """
        off = {layer for layer, tau in self.layer_tau.items() if tau == "off"} | set(architecture.layers_apart)
        return [layer for layer in range(architecture.num_layers) if layer not in off]

    def tau_of(self, layer: int) -> float:
        """Return tau of a layer that is not off."""
        tau = self.layer_tau.get(layer, self.tau)
        assert tau != "off", f"mac: layer {layer} is off"
        return tau
