"""Multiply matrices of few bits with the library humming-kernels: in its layout, by its kernels, which are kept on
disk.

A packed matrix is converted to the library's layout, and only that copy is held. A kernel is for a shape, a format and
a range of token counts. `prepare` compiles the kernels that a deployment needs (NVRTC or nvcc, seconds each, in
parallel) and loads them; a product with another token count compiles its own, which `num_compiled` counts. Kernels are
kept in the user's cache folder, by version and GPU.

A product differs from that of the packed matrix in two ways. Scales are rounded to bf16, except those of blocks. Sums
of long rows are added in parts, in bf16 and in no fixed order, so that the last bits differ between runs. Products that
share locks must not run side by side: each stream has its own locks, also streams on which graphs are captured, and
graphs of one such stream are replayed one after another. Bytes moved: the weights once; a result once more if bias,
residual or activation follow.
"""

import logging
import os
import re
import time
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gpu.model.humming_formats import VERSION, require_installed, why_not_here
from gpu.model.spec import Activation, ModelError
from gpu.operations.arguments import check
from gpu.operations.linear.fp8_linear import why_no_scaled_product
from gpu.operations.linear.packed_matrix import Packed
from gpu.operations.linear.word_layout import unpack_words
from gpu.operations.rms_norm import rms_norm
from gpu.operations.swiglu import swiglu

log = logging.getLogger(__name__)

LOCKS = 2048  # int32, of a stream: as many as the library's own layers have
MOST_STREAMS = 64
NUMBERS_AT_ONCE = 2**23  # that are put in order
UNPACKED_COLUMNS = 64  # that are multiplied by ones at once
DTYPES = {"int4": "uint4", "int8": "uint8", "fp8": "float8e4m3"}

Progress = Callable[[float], None]


def require_products(asked: str, device: torch.device, dtype: str) -> None:
    """Raise ModelError if the kernels asked for cannot multiply on this device; own kernels always can."""
    reason = why_not_here(asked, device.type, dtype)
    if asked == "fp8" and reason is None and (failure := why_no_scaled_product(device)) is not None:
        reason = (
            f"model.products: asked fp8, which this device does not multiply by rows' scales ({failure}); wanted own"
        )
    if reason is not None:
        raise ModelError(reason)
    if asked == "humming":
        require_installed()


def kernel_folder(gpu: str) -> Path:
    """Return the folder of kernels for a GPU of this name, in the user's cache folder."""
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return user / "tandem" / "humming" / f"{VERSION}-{re.sub(r'[^a-z0-9]+', '-', gpu.lower())}"


class HummingMatrix:
    """A `Matrix` that humming-kernels multiplies, in bf16. It is made of a packed matrix on CUDA whose format
    `why_not_humming` does not object to.
    """

    dtype = torch.bfloat16

    def __init__(self, packed: Packed) -> None:
        """Lay out a packed matrix. Raises ModelError for zero points that do not fit, and if the library fails."""
        assert packed.dtype == self.dtype, "the plan refuses others"
        self.rows, self.inner = packed.rows, packed.inner
        config, self._tensors = _lay_out(packed)
        self.kernels = _kernels(config, packed.device)

    @property
    def shape(self) -> tuple[int, int]:
        return self.rows, self.inner

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def linear(self, x: Tensor, residual: Tensor | None = None, overwrites: bool = False) -> Tensor:
        product = self._product(x)
        if residual is None:
            return product
        check("humming linear", "residual", residual, (len(x), self.rows), self.dtype, x.device)
        return product.add_(residual)

    def norm_linear(self, x: Tensor, norm: Tensor, eps: float, bias: Tensor | None) -> Tensor:
        product = self._product(rms_norm(x, norm, eps))
        return product if bias is None else product.add_(bias)

    def gate_up(self, x: Tensor, activation: Activation) -> Tensor:
        return swiglu(self._product(x), activation)

    def norm_gate_up(self, x: Tensor, norm: Tensor, eps: float, activation: Activation) -> Tensor:
        return self.gate_up(rms_norm(x, norm, eps), activation)

    def logits(self, x: Tensor) -> Tensor:
        """Return logits from sums rounded to bf16. That is too coarse, so output matrices are not laid out this way."""
        return self._product(x).float()

    def unpack(self) -> Tensor:
        """Unpack by products with ones, so that each number is rounded once."""
        device = self._tensors["weight"].device
        found = torch.empty(self.rows, self.inner, dtype=self.dtype, device=device)
        for columns in torch.arange(self.inner, device=device).split(UNPACKED_COLUMNS):
            ones = torch.zeros(len(columns), self.inner, dtype=self.dtype, device=device)
            found[:, columns] = self._product(ones.scatter_(1, columns[:, None], 1.0)).t()
        return found

    def load(self, kernels: Iterable[Tensor]) -> None:
        """Load kernels by running them, because loading one during a capture would end the capture."""
        one = torch.zeros(1, self.inner, dtype=self.dtype, device=self._tensors["weight"].device)
        for kernel in kernels:
            self._launch(one, kernel)

    def _product(self, x: Tensor) -> Tensor:
        if x.ndim != 2 or x.shape[1] != self.inner:
            raise ValueError(f"humming: x is {tuple(x.shape)}; wanted [tokens, {self.inner}]")
        if not len(x):
            return torch.empty(0, self.rows, dtype=self.dtype, device=x.device)
        if not self.kernels.has(len(x)):
            self.load(self.kernels.compile([len(x)]))
        return self._launch(x.to(self.dtype).contiguous(), self.kernels.of(len(x)))

    def _launch(self, x: Tensor, kernel: Tensor) -> Tensor:
        out = torch.empty(len(x), self.rows, dtype=self.dtype, device=x.device)
        return _library().ops.launch_kernel(
            configs=kernel, inputs=x, outputs=out, locks=_locks(x.device), **self._tensors
        )  # fmt: skip


class _Kernels:
    """The compiled kernels of one shape and format on one device, by range of token counts. Several ranges may share a
    kernel.
    """

    def __init__(self, config: Any, device: torch.device) -> None:
        self._config, self._device = config, device
        # [begin, end, how a kernel of counts in (begin, end] is made], in order; the last one has no end
        self._ranges: list[list[Any]] = _library().get_heuristics_config(config, device=device)
        self._ends = [end for _, end, _ in self._ranges]
        self._ids: dict[str, int] = {}  # the library's ids of compiled kernels, by their tuning
        self._ready: dict[int, Tensor] = {}  # by range: int64 [2] on the host, an id and how many SMs it runs on

    @property
    def num_compiled(self) -> int:
        return len(self._ids)

    def has(self, count: int) -> bool:
        return bisect_left(self._ends, count) in self._ready

    def of(self, count: int) -> Tensor:
        return self._ready[bisect_left(self._ends, count)]

    def missing(self, counts: Collection[int]) -> dict[str, list[Any]]:
        """Return the ranges of token counts whose kernels are not compiled yet, one range for each kernel."""
        wanted = (self._ranges[place] for place in self._places(counts))
        return {key: one for one in wanted if (key := _made_as(one[2])) not in self._ids}

    def compile(self, counts: Collection[int]) -> list[Tensor]:
        """Compile missing kernels and return one launch of each. Raises ModelError if the library fails."""
        missing = self.missing(counts)
        if missing:
            ranges = list(missing.values())
            with _failure_in_one_line():
                made = _library().HummingKernel.prepare_kernels(self._config.to_str(), None, ranges, self._device)
            self._ids |= dict(zip(missing, made.view(-1, 4)[:, 2].tolist(), strict=True))
        for place in self._places(counts):
            self._ready[place] = self._launch_of(self._ranges[place])
        return [self._launch_of(one) for one in missing.values()]

    def _places(self, counts: Collection[int]) -> list[int]:
        return sorted({bisect_left(self._ends, count) for count in counts})

    def _launch_of(self, one: list[Any]) -> Tensor:
        return torch.tensor([self._ids[_made_as(one[2])], one[2].get("num_sms", 0)])


def _made_as(tuning: dict[str, Any]) -> str:
    """Return a kernel's tuning as text: kernels with the same text are one kernel."""
    return str(sorted((key, value) for key, value in tuning.items() if key != "num_sms"))


def prepare(matrices: Iterable[object], counts: Collection[int], on_progress: Progress) -> None:
    """Compile and load the kernels that multiply each HummingMatrix by any of `counts` tokens, and log the time it
    took.
    """
    first = {matrix.kernels: matrix for matrix in matrices if isinstance(matrix, HummingMatrix)}
    if not first:
        return
    began, done, before = time.monotonic(), 0, num_compiled()
    on_progress(0.0)
    # Those of a shape are compiled side by side by the library; where they are few, so are several shapes.
    most = max(len(kernels.missing(counts)) for kernels in first)
    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)) // max(1, most))) as threads:
        for kernels, made in zip(first, threads.map(lambda one: one.compile(counts), first), strict=True):
            first[kernels].load(made)
            done += 1
            on_progress(done / len(first))
    made, seconds, folder = num_compiled() - before, time.monotonic() - began, os.environ["HUMMING_CACHE_DIR"]
    log.info("products event=ready kernels=%d shapes=%d seconds=%.1f folder=%s", made, len(first), seconds, folder)


def num_compiled() -> int:
    """Return how many kernels this process has compiled. Steps after `prepare` should add none."""
    return sum(kernels.num_compiled for kernels in _MADE.values())


class _Library(NamedTuple):
    """The parts of humming-kernels that are used."""

    ops: ModuleType
    get_heuristics_config: Callable[..., Any]
    prepare_layer_config: Callable[..., Any]
    transform_humming_tensors: Callable[..., Any]
    HummingWeightSchema: Callable[..., Any]
    HummingKernel: Any


@cache
def _library() -> _Library:
    """Import the library. It reads its folders from the environment when it first compiles; variables that are set are
    kept. Raises ModelError if the library, or a compiler that it needs, is missing.
    """
    require_installed()
    folder = kernel_folder(torch.cuda.get_device_name())
    os.environ.setdefault("HUMMING_CACHE_DIR", str(folder))
    os.environ.setdefault("HUMMING_TMP_DIR", str(folder / "tmp"))
    with _without_builders():
        from humming import ops
        from humming.kernel.humming import HummingKernel
        from humming.schema import HummingWeightSchema
        from humming.transform import prepare_layer_config, transform_humming_tensors
        from humming.tune import get_heuristics_config
        from humming.utils.nvrtc import get_nvrtc_library_path

    try:
        nvrtc = Path(get_nvrtc_library_path())
    except RuntimeError as error:
        raise ModelError(
            f"model.products: humming cannot compile ({error}); pip install '.[humming]', or own"
        ) from None
    # It compiles in processes of its own, in which NVRTC looks for its builtins by name.
    paths = str(nvrtc.parent), os.environ.get("LD_LIBRARY_PATH")
    os.environ["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
    return _Library(
        ops, get_heuristics_config, prepare_layer_config, transform_humming_tensors, HummingWeightSchema, HummingKernel
    )


@contextmanager
def _without_builders() -> Iterator[None]:
    """Keep the library from starting two processes on import, which would build what its wheel contains. Only during
    import, because with this setting it would later compile with a single thread.
    """
    key = "HUMMING_DISABLE_PARALLEL_BUILD"
    before = os.environ.get(key)
    os.environ[key] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[key]
        else:
            os.environ[key] = before


@contextmanager
def _failure_in_one_line() -> Iterator[None]:
    """Turn the library's error for a kernel that it cannot compile or save into a ModelError."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (OSError, RuntimeError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ModelError(f"model.products: humming cannot make its kernels ({reason}); mend that, or own") from None


_MADE: dict[tuple[str, torch.device], _Kernels] = {}
_LOCKS: dict[torch.device, tuple[Tensor, dict[int, int]]] = {}


def _kernels(config: Any, device: torch.device) -> _Kernels:
    key = (config.to_str(), device)
    if key not in _MADE:
        _MADE[key] = _Kernels(config, device)
    return _MADE[key]


def _locks(device: torch.device) -> Tensor:
    """Return the locks of the current stream, int32 `[LOCKS]`, zero whenever no product is running. The first product
    of a process, which is outside of graphs, allocates those of all streams.
    """
    if device not in _LOCKS:
        _LOCKS[device] = torch.zeros(MOST_STREAMS, LOCKS, dtype=torch.int32, device=device), {}
        torch.cuda.synchronize(device)  # another stream may be the first to use its locks
    locks, places = _LOCKS[device]
    place = places.setdefault(torch.cuda.current_stream(device).cuda_stream, len(places))
    assert place < MOST_STREAMS, f"humming: products on more than {MOST_STREAMS} streams"
    return locks[place]


def _lay_out(packed: Packed) -> tuple[Any, dict[str, Tensor]]:
    """Return the library's description of the matrix, and its tensors by the names of launch arguments."""
    library, has_zeros = _library(), packed.zeros is not None
    has_blocks = packed.row_block > 1 and packed.group < packed.inner
    schema = library.HummingWeightSchema(
        b_dtype=DTYPES[packed.kind], has_zero_point=has_zeros,
        weight_scale_group_size=packed.group if packed.group < packed.inner else 0,
        weight_scale_group_size_n=packed.row_block if has_blocks else 0,
    )  # fmt: skip
    config = library.prepare_layer_config(
        packed.rows, packed.inner, schema, torch_dtype=torch.bfloat16, device=packed.device
    )
    scales = packed.scales.float() if has_blocks else packed.scales.to(torch.bfloat16)
    if packed.row_block > 1 and not has_blocks:
        scales = scales.repeat_interleave(packed.row_block, 0)[: packed.rows]
    tensors = {"weight": words_in_order(packed), "weight_scale": scales}
    if packed.zeros is not None:
        if int(packed.zeros.max()) >= 2**packed.bits:
            raise ModelError(
                f"model.products: humming has no room for a zero point of {int(packed.zeros.max())} in {packed.kind}, "
                f"at most {2**packed.bits - 1}; wanted own"
            )
        tensors["zero_point"] = numbers_in_order(packed.zeros.t(), packed.bits).t().contiguous()
    with _failure_in_one_line():
        return config, library.transform_humming_tensors(config, tensors, already_padded=True)


def words_in_order(packed: Packed) -> Tensor:
    """Return int32 `[rows, inner * bits / 32]`: columns from the lowest bits of a word up."""
    words = torch.empty(packed.rows, packed.inner * packed.bits // 32, dtype=torch.int32, device=packed.device)
    step = max(1, NUMBERS_AT_ONCE // packed.inner)
    for own, part in zip(words.split(step), packed.words.split(step), strict=True):
        own.copy_(numbers_in_order(unpack_words(part, packed.bits, packed.inner), packed.bits))
    return words


def numbers_in_order(numbers: Tensor, bits: int) -> Tensor:
    """Pack uint8 `[rows, columns]` below `2**bits`, 4 or 8, to int32 `[rows, columns * bits / 32]`."""
    if bits == 4:
        numbers = numbers[:, 0::2] | numbers[:, 1::2] << 4
    return numbers.flatten().view(torch.int32).view(len(numbers), -1)
