"""Decide how packed matrices are multiplied: by our kernels, by the library humming-kernels, or by tokens in FP8.

A matrix that cannot be multiplied as asked is refused by name, or multiplied by our own kernels and reported.
"""

from collections import Counter
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version

from gpu.model.matrix_formats import OF_EXPERTS, layer_formats, matrix_shapes, output_format, unwidened_names
from gpu.model.spec import Architecture, ModelError

PACKAGE, VERSION = "humming-kernels", "0.1.19"


def multiplied(architecture: Architecture, asked: str, key: str) -> Architecture:
    """Return a shape whose packed matrices are multiplied as `asked`: by "own" kernels; by kernels that multiply
    "integers" on a CPU, which "auto" also chooses there; by "humming" where it can; or by tokens in "fp8".

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
    by_library = asked == "humming"
    own = replace(architecture.quantisation, humming=by_library, rounds_tokens=not by_library)
    shape = replace(architecture, quantisation=own)
    if not any(unwidened_names(shape, layer) for layer in range(shape.num_layers)):
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
    if products == "fp8" and device == "cuda" and dtype != "bfloat16":
        return f"model.products: asked fp8, which multiplies in bfloat16 on a GPU, gpu.dtype is {dtype}; wanted own"
    if products != "humming":
        return None
    if device != "cuda":
        return "model.products: asked humming, the device is the CPU; wanted a CUDA device, or own"
    if dtype != "bfloat16":
        return f"model.products: asked humming, which multiplies in bfloat16, gpu.dtype is {dtype}; wanted own"
    return None


def products_key(architecture: Architecture, device: str, is_packed: bool) -> str:
    """Return the name of a model's products on a device ("cuda", "cpu"), for keys of cached results: "integers",
    "humming" or "fp8", whose results differ from those of our own kernels for floats, which have the name "".
    is_packed: whether matrices of few bits stay packed.
    """
    own = architecture.quantisation
    if own is None:
        return ""
    if device == "cuda" and own.humming:
        return "humming"
    if not is_packed:
        return ""
    return "integers" if device == "cpu" and own.integers else "fp8" if own.rounds_tokens else ""


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
    """Describe the packed matrices of a model that neither humming nor tokens in FP8 multiply, and why; "" for none."""
    assert architecture.quantisation is not None, "a plain model has none"
    by_library, found = architecture.quantisation.humming, Counter[str]()
    for layer, spec in enumerate(architecture.layers):
        for name, stored in layer_formats(architecture, layer).items():
            if stored is not None and not (stored.humming or stored.rounds_tokens):
                why_not = stored.why_not_humming if by_library else stored.why_not_rounding
                reason = why_not(*matrix_shapes(architecture, spec)[name])
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
