"""Compute attention methods over full KV: reference implementations, for quality and not for speed."""
