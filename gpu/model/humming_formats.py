"""List the products that the library humming-kernels computes, and the memory it needs beside the matrices.

A request that the library cannot fulfil is refused by name, or computed by our own kernels and reported.
"""

from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from gpu.model.matrix_formats import OF_EXPERTS, humming_names, layer_formats, matrix_shapes, output_format
from gpu.model.spec import Architecture, ModelError

PACKAGE, VERSION = "humming-kernels", "0.1.19"


def multiplied(architecture: Architecture, asked: str, key: str) -> Architecture:
    """Return a shape whose matrices of few bits are multiplied as `asked`: by "own" kernels, by those which on a CPU
    multiply "integers" ("auto": the same, where the device is a CPU), or by "humming" where it can.

    Raises ModelError where it can multiply none of them, but for "auto".
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
    """Return what keeps a device from `model.products`; None: nothing. A library may not be installed."""
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
    """Return what names a model's products on a device ("cuda", "cpu") in keys of what they made: "integers" or
    "humming", whose numbers are not those of our own of floats, which are "". is_packed: whether matrices of few bits
    stay as they are stored.
    """
    own = architecture.quantisation
    if own is None:
        return ""
    if device == "cpu":
        return "integers" if own.integers and is_packed else ""
    return "humming" if own.humming else ""


def require_installed() -> None:
    """Raise ModelError, one line, where the library is not there, or is another version."""
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
    """Return which matrices of few bits humming does not multiply in a model, and why; "" for none."""
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
    """Return the bytes that laying out takes at load beside the matrices: twice the largest; 0: none."""
    return max(
        (
            2 * stored.num_bytes(*matrix_shapes(architecture, spec)[name])
            for layer, spec in enumerate(architecture.layers if architecture.quantisation is not None else ())
            for name, stored in layer_formats(architecture, layer).items()
            if stored is not None and stored.humming
        ),
        default=0,
    )
