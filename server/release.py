"""Tell which release of Tandem this is."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release() -> str:
    """Return the installed version, such as `0.1.0`, or `source` where the project runs without being installed."""
    try:
        return version("tandem")
    except PackageNotFoundError:
        return "source"
