"""Compile the CPU's decode step in a child process at a machine's first start, while steps run layer by layer.

The child fills Numba's cache, and a later step loads the code from there. If the compiler crashes, only the child ends.
"""

import json
import logging
import subprocess
import sys
import time
from collections.abc import Sequence

import numba
import torch

from gpu.cpu_step.cpu_step import kinds_of
from gpu.cpu_step.step_kernel import COMPILED
from transfer.simd.numba_cache import cached_signatures, can_save

log = logging.getLogger(__name__)

COMPILE = (sys.executable, "-m", "gpu.compile_step")
WORK = COMPILED[0]  # the function that takes a model, as its third argument


def is_cached(dtypes: tuple[torch.dtype, torch.dtype]) -> bool:
    """Return whether the cache has the step's code for these dtypes of the embedding and of rows in pages."""
    kinds = tuple(numba.typeof(kind) for kind in kinds_of(*dtypes))
    return any(signature[2].types[:2] == kinds for signature in cached_signatures(WORK))


class StepCode:
    """The code of a compiled step: ready, being compiled, or not available."""

    def __init__(
        self, dtypes: tuple[torch.dtype, torch.dtype], settings: str | None, kinds: Sequence[tuple[str, int]] = ()
    ) -> None:
        """Start the child process if the code is needed, missing and can be cached.

        Otherwise the first compiled step compiles it. dtypes: of the embedding and of rows in pages. settings, kinds:
        see `gpu.compile_step`; settings None: no child is started.
        """
        self._dtypes, self._began_s = dtypes, time.monotonic()
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = settings is None or is_cached(dtypes) or not can_save(WORK)
        if not self._is_ready and settings is not None:
            self._child = subprocess.Popen(
                [*COMPILE, settings, json.dumps(kinds)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
            )
            log.info("decode event=compiling effect='steps go layer by layer until that is done, once a machine'")

    def is_ready(self) -> bool:
        """Return whether a step may use the code."""
        if self._child is not None and self._child.poll() is not None:
            status = self._child.returncode
            self.close()
            self._is_ready = is_cached(self._dtypes)
            if self._is_ready:
                log.info("decode event=compiled seconds=%.1f", time.monotonic() - self._began_s)
            else:
                log.warning("decode event=not_compiled status=%d effect='steps go layer by layer'", status)
        return self._is_ready

    def close(self) -> None:
        """Kill the child process, if there is one."""
        if self._child is not None:
            self._child.kill()
            self._child.communicate()
            self._child = None
