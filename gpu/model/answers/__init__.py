"""Describe how models write their answers: calls of tools, reasoning and channels, as data.

A family's folder names its formats in FAMILY. What is of one family alone stands in `answers.py` of its folder, what
several share stands here.
"""
