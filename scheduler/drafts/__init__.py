"""Propose tokens that may follow, and decide whether it pays to compute them ahead of their draws."""
