"""A kernel that is compiled while requests wait is reported by name, and one from the cache is not."""

import logging

import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from gpu.late_compilations import report_late_compilations


def _double(numbers):
    at = tl.program_id(0)
    tl.store(numbers + at, tl.load(numbers + at) * 2.0)


def test_a_kernel_that_is_compiled_is_reported_once_and_not_from_the_cache(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    with triton.knobs.compilation.scope(), caplog.at_level(logging.WARNING, "gpu.late_compilations"):
        report_late_compilations()
        for _ in range(2):
            source = ASTSource(JITFunction(_double), {"numbers": "*fp32"})
            triton.compile(source, target=GPUTarget("cuda", 90, 32))
    (record,) = caplog.records
    assert "event=compiled_late name=_double seconds=" in record.getMessage()
    assert 0.0 < float(record.getMessage().split("seconds=")[1].split()[0]) < 60.0
