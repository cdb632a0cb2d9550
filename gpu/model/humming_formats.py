"""Find the matrices that the library humming-kernels can multiply, and the memory that it needs beside them.

A matrix that the library cannot multiply is refused by name, or multiplied by our own kernels and reported.
"""

from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from gpu.model.matrix_formats import OF_EXPERTS, humming_names, layer_formats, matrix_shapes, output_format
from gpu.model.spec import Architecture, ModelError

PACKAGE, VERSION = "humming-kernels", "0.1.19"


def multiplied(architecture: Architecture, asked: str, key: str) -> Architecture:
    """Return a shape whose packed matrices are multiplied as `asked`: by "own" kernels; by kernels that multiply
    "integers" on a CPU, which "auto" also chooses there; or by "humming" where it can.

    Raises ModelError if none of the matrices can be multiplied so, except for "auto".
    """
    if asked == "own" or (asked == "auto" and architecture.quantisation is None):
        return architecture
    if architecture.quantisation is None:
        raise ModelError(
            f"{key}: asked {asked}, {architecture.name} is in 16 bits; wanted matrices of few bits: set model.weights "
            "to int4, int8 or fp8, or leave it out"
        )
    if asked in ("auto", "integers"):
        own = replace(architecture.quantisation, integers=True, wants_cpu=asked == "integers")
        return replace(architecture, quantisation=own)
    shape = replace(architecture, quantisation=replace(architecture.quantisation, humming=True))
    if not any(humming_names(shape, layer) for layer in range(shape.num_layers)):
        raise ModelError(
            f"{key}: asked {asked}, which multiplies none of the matrices of {shape.name} ({describe_own(shape)}); "
            "leave it out"
        )
    return shape


def why_not_here(products: str, device: str, dtype: str) -> str | None:
    """Return the reason why a device cannot compute `model.products`; None if it can. Whether a library is installed is
    not checked.
    """
    if products == "integers" and device == "cuda":
        return (
            "model.products: asked integers, the device is a CUDA device; wanted the CPU, or auto, which multiplies "
            "the experts that the CPU computes in integers"
        )
    if products != "humming":
        return None
    if device != "cuda":
        return "model.products: asked humming, the device is the CPU; wanted a CUDA device, or own"
    if dtype != "bfloat16":
        return f"model.products: asked humming, which multiplies in bfloat16, gpu.dtype is {dtype}; wanted own"
    return None


def products_key(architecture: Architecture, device: str, is_packed: bool) -> str:
    """Return the name of a model's products on a device ("cuda", "cpu"), for keys of cached results: "integers" or
    "humming", whose results differ from those of our own kernels for floats, which have the name "". is_packed: whether
    matrices of few bits stay packed.
    """
    own = architecture.quantisation
    if own is None:
        return ""
    if device == "cpu":
        return "integers" if own.integers and is_packed else ""
    return "humming" if own.humming else ""


def require_installed() -> None:
    """Raise ModelError if the library is missing or has another version."""
    try:
        found = version(PACKAGE)
    except PackageNotFoundError:
        found = "none"
    if found != VERSION:
        raise ModelError(
            f"model.products: asked humming, found {found} of {PACKAGE}; wanted {VERSION}: pip install '.[humming]', "
            "or own"
        )


def describe_own(architecture: Architecture) -> str:
    """Describe the packed matrices of a model that humming does not multiply, and why; "" for none."""
    found: Counter[str] = Counter()
    for layer, spec in enumerate(architecture.layers):
        for name, stored in layer_formats(architecture, layer).items():
            if stored is not None and not stored.humming:
                reason = stored.why_not_humming(*matrix_shapes(architecture, spec)[name])
                found[f"{name}: {'of experts' if name in OF_EXPERTS else reason}"] += 1
    parts = [f"{what} ({count} layers)" for what, count in found.items()]
    if output_format(architecture) is not None:
        parts.append("output matrix: logits are float32")
    return "; ".join(parts)


def laying_out_bytes(architecture: Architecture) -> int:
    """Return the bytes beside the matrices that their conversion takes at load: twice the largest; 0: none."""
    return max(
        (
            2 * stored.num_bytes(*matrix_shapes(architecture, spec)[name])
            for layer, spec in enumerate(architecture.layers if architecture.quantisation is not None else ())
            for name, stored in layer_formats(architecture, layer).items()
            if stored is not None and stored.humming
        ),
        default=0,
    )
