"""Decide which requests wait, which hold a slot, and which are preempted."""
