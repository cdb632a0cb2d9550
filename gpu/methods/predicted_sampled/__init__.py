"""Predicted blocks read exactly on the device, and a sample of all that is left: no token is out of reach.

All that predicts and fetches is `gpu.methods.predicted`'s; what the host reads is a sample, as `sampled` has it.
"""

from gpu.methods.predicted import Predicted
from gpu.methods.sampled import Sampled
from transfer.reading import Reading


class PredictedSampled(Predicted):
    name = "predicted+sampled"
    summary = (
        "As `predicted`, but the CPU reads a sample of the blocks that are not fetched, so nothing is dropped."
    )  # fmt: skip
    reading = Reading.SAMPLE
    drafts = False
    why_no_drafts = Sampled.why_no_drafts
    plan_words = "predicted blocks, the rest sampled"
    measured = "gains 0.8 points (a loss of 0.3 to a gain of 2.1) on SmolLM2-135M-Instruct over 127 prompts: too few"


METHOD = PredictedSampled()
