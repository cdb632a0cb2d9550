"""Report kernels that are compiled after the start, while requests wait.

All kernels that requests need are meant to be compiled before the server is ready. One that is not stops every stream
for up to some seconds, the first time that it is needed on a machine.
"""

import logging
from typing import TYPE_CHECKING, Any

import triton

if TYPE_CHECKING:
    from triton.knobs import CompileTimes

log = logging.getLogger(__name__)


def report_late_compilations() -> None:
    """Log each kernel that Triton compiles in this process from now on, with its name and the seconds that it took.

    Kernels that come from Triton's cache on disk are not reported: they take milliseconds.
    """
    triton.knobs.compilation.listener = _report


def _report(*, metadata: dict[str, Any], times: "CompileTimes", cache_hit: bool, **_: object) -> None:
    if not cache_hit:
        log.warning(
            "kernels event=compiled_late name=%s seconds=%.2f effect='requests waited; once a machine'",
            metadata.get("name"), times.total / 1e6,
        )  # fmt: skip
