"""Vector code and threads for numba kernels, shared by both sides: they may not import each other."""
