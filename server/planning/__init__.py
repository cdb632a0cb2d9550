"""Resolve a deployment against a machine."""
