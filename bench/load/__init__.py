"""Send requests to any OpenAI-compatible URL, and measure what its users would experience.

Invariant: every request that was due is in the report, as completed, failed with a reason, or unfinished.
"""
