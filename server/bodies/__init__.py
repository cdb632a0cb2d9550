"""Declare, decode and check request bodies."""
