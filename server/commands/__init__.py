"""Implement the commands of `tandem`."""
