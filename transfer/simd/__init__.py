"""Vector code and threads for numba kernels, shared by both sides: they may not import each other.

Whatever numba compiles with `cache=True` is in a module that imports something of this package.
"""

from transfer.simd.numba_cache import go_on_without_cache

go_on_without_cache()
