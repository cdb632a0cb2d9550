"""The load-test client: sends requests to any OpenAI-compatible URL and measures what a user of it would feel.

It knows HTTP, text and clocks; nothing of Tandem's engine, so that any server can be measured with it. Invariant: every
request that was due is in the report, as completed, failed with a reason, or unfinished.
"""
