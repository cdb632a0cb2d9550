"""Hold vector code and threads for numba kernels, shared by `cpu` and `gpu`, which may not import each other.

Every module with functions that numba compiles with `cache=True` imports something from this package.
"""

from transfer.simd.numba_cache import go_on_without_cache

go_on_without_cache()
