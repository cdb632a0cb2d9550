"""The attention methods, a folder each: what one states of itself, its kernels and state.

`docs/ARCHITECTURE.md` says how to add one; `tests/gpu/new_method/alternate` is the smallest that does something.
"""
