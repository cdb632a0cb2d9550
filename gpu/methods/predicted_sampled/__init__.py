"""Predicted blocks read exactly on the device, and a sample of all that is left: no token is out of reach.

All that predicts and fetches is `gpu.methods.predicted`'s; what the host reads is a sample, as `sampled` has it.
"""

from dataclasses import replace

from gpu.methods.predicted import METHOD as PREDICTED

METHOD = replace(
    PREDICTED,
    name="predicted+sampled",
    summary="As `predicted`, but the CPU reads a sample of the blocks that are not fetched, so nothing is dropped.",
    reading="sample",
)
