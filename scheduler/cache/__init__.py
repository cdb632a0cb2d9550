"""Pools of pages, windows and rings on the device, and the prefixes that requests share."""
