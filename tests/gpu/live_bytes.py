"""How many bytes torch's tensors hold at once, counted after each operation: the same on every run, on any device."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Within it, of this thread's operations; what an operation allocates and frees within itself is not seen. known:
    tensors that were there before and are not counted.
    """

    def __init__(self, known: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    @property
    def now(self) -> int:
        self._held = {key: (held, size) for key, (held, size) in self._held.items() if not held.expired()}
        return sum(size for _, size in self._held.values())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                held = StorageWeakRef(tensor.untyped_storage())
                if held.cdata in self._known:
                    continue
                self._held[held.cdata] = held, tensor.untyped_storage().nbytes()
        self.peak = max(self.peak, self.now)
        return made
