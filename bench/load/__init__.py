"""Load any OpenAI-compatible URL with requests, and measure what a user of it would feel.

Invariant: every request that was due is in the report, as completed, failed with a reason, or unfinished.
"""
