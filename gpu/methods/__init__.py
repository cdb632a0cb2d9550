"""The attention methods, a folder each: what one states of itself, its kernels and state."""
