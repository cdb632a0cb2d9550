"""Compile JSON schemas, patterns and choices into grammars that hold an answer."""
