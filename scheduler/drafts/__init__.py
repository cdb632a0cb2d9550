"""Tokens that may follow, and whether it pays to compute them ahead of their draws."""
