"""Choose the vector instructions of this process: AVX-512 if the processor has it, else AVX2; or those that TANDEM_SIMD
names.

The choice is made once, on import. With TANDEM_SIMD=avx2 on a wider processor, numba compiles for a processor without
AVX-512, so that both paths can be tested and timed on one machine.
"""

import os

import llvmlite.binding as llvm
from numba import config

NEEDED = {
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512dq", "avx512vl"),
}
_NO_WIDER = "haswell"  # the first processor with AVX2 and FMA


def missing_features(name: str) -> list[str]:
    """Return the features of "avx2" or "avx512" that this processor lacks."""
    host = llvm.get_host_cpu_features()
    return [feature for feature in NEEDED[name] if not host.get(feature)]


def _choose() -> str:
    asked = os.environ.get("TANDEM_SIMD")
    if asked is None:
        return "avx2" if missing_features("avx512") else "avx512"
    if asked not in NEEDED:
        raise ValueError(f"TANDEM_SIMD: asked {asked!r}, have {', '.join(NEEDED)}; set one of these or none")
    if asked == "avx512" and missing_features(asked):
        raise ValueError(
            f"TANDEM_SIMD: asked avx512, the processor lacks {', '.join(missing_features(asked))}; unset it"
        )
    if asked == "avx2" and not missing_features("avx512"):
        config.CPU_NAME, config.CPU_FEATURES = _NO_WIDER, None
    return asked


def _keep_dot_products() -> None:
    """Have LLVM keep `vpdpwssd`, which for Intel processors it splits into two instructions although the processors are
    as fast with it. Products of integers then take 0.65 to 0.8 of the time (lab/LAB.md).
    """
    host = llvm.get_host_cpu_features()
    if config.CPU_NAME is None and config.CPU_FEATURES is None and host.get("avx512vnni"):
        config.CPU_FEATURES = f"{host.flatten()},+fast-dpwssd"


SIMD = _choose()
_keep_dot_products()
LANES = {"avx2": 8, "avx512": 16}[SIMD]  # float32 in a vector
HAS_PAIRS = SIMD == "avx512" and bool(llvm.get_host_cpu_features().get("avx512bf16"))  # products of pairs of bf16
HAS_VECTORS = not missing_features(SIMD)


def require_vectors() -> None:
    """Raise RuntimeError if the processor lacks the vectors that the kernels need."""
    if not HAS_VECTORS:
        lacking = ", ".join(missing_features(SIMD))
        raise RuntimeError(f"processor: lacks {lacking}; attention on the host needs an x86-64 with AVX2 and FMA")
