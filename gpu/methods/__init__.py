"""Hold the attention methods, a folder each: a method's description of itself, its kernels and its state.

`docs/ARCHITECTURE.md` says how to add a method; `tests/gpu/new_method/alternate` is a small example.
"""
