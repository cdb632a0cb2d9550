"""Define the error of a benchmark whose result is wrong, without loading torch."""


class GateError(Exception):
    """Raised by a benchmark whose result is wrong; it reports no number."""
