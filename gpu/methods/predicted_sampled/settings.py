"""Define the settings of predicted blocks beside a sample of the rest. No torch: plan and server read them."""

from typing import Literal

from pydantic import Field

from gpu.methods.predicted.settings import PredictedSettings


class PredictedSampledSettings(PredictedSettings):
    """The settings of `predicted`, and what happens to a block that does not come in time."""

    late: Literal["wait", "sample"] = Field(
        "wait", description="what to do about blocks whose fetch has not begun when a step ends: wait for them, or "
        "sample: leave them to the next step's sample; not with host.residency fixed, since texts depend on load"
    )  # fmt: skip

    @property
    def leaves_late(self) -> bool:
        return self.late == "sample"
