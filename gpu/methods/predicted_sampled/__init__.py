"""Read predicted blocks exactly on the device, and a sample of all the rest on the CPU, so that no token is out of
reach.

Prediction and fetching are those of `gpu.methods.predicted`; the host reads a sample as in `sampled`. Late blocks may
be left to that sample. Then what a step reads depends on the speed of the link.
"""

from typing import Any

from gpu.methods.predicted import Predicted
from gpu.methods.predicted_sampled.settings import PredictedSampledSettings
from gpu.methods.sampled import Sampled
from transfer.host_config import HostConfig
from transfer.reading import Reading


class PredictedSampled(Predicted):
    name = "predicted+sampled"
    summary = (
        "As `predicted`, but the CPU reads a sample of the blocks that are not fetched, so nothing is dropped."
    )  # fmt: skip
    settings = PredictedSampledSettings
    kv_settings = {**Predicted.kv_settings, "late": "late"}
    reading = Reading.SAMPLE
    drafts = False
    why_no_drafts = Sampled.why_no_drafts
    host_counters = Sampled.host_counters
    plan_words = "predicted blocks, the rest sampled"
    measured = "gains 0.8 points (a loss of 0.3 to a gain of 2.1) on SmolLM2-135M-Instruct over 127 prompts: too few"
    cpu_time = "570 ms a token at 5,900 tokens (exact: 60)"

    def find_conflict(self, settings: Any, host: HostConfig) -> str | None:
        if settings.leaves_late and host.residency == "fixed":
            return (
                "late: got 'sample' beside host.residency 'fixed', which guarantees the same text at any load; "
                "wanted 'wait', or host.residency 'adaptive'"
            )
        return super().find_conflict(settings, host)


METHOD = PredictedSampled()
