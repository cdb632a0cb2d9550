"""The error of a benchmark whose result is wrong. Importing it loads no torch."""


class GateError(Exception):
    """A benchmark whose result is wrong, and which therefore reports no number."""
