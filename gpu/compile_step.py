"""Compile the CPU's decode step into numba's cache: `python -m gpu.compile_step SETTINGS KINDS`, a `GpuConfig` and
pairs of `compile_widening` in JSON.

It loads a tiny model, whose step has the same types as any other model's, and runs it. Then it compiles the functions
that embeddings and prompts of packed matrices need. It ends when its standard input ends.
"""

import json
import os
import sys
import threading

_NICE = 5  # answering requests has priority
_TOKENS = 64


def main(settings: str, kinds: str) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()  # before the imports, which take seconds
    os.nice(_NICE)
    from transfer.no_triton import leave_out_triton

    leave_out_triton()
    compile_step(settings)
    compile_kinds(json.loads(kinds))
    os._exit(0)  # the thread waits for input


def compile_step(settings: str) -> None:
    """Load the tiny model with these settings, which compiles its step."""
    from gpu.config import GpuConfig, ModelConfig
    from gpu.load import load_runner
    from gpu.runner_settings import LoadSettings

    gpu = GpuConfig.model_validate_json(settings)
    asked = LoadSettings(
        max_running=1,
        max_context_tokens=_TOKENS,
        chunk_tokens=_TOKENS,
        max_hidden_tokens=_TOKENS,
        num_pages=2 * _TOKENS // gpu.page_tokens,
    )
    load_runner(ModelConfig(random_weights="tiny"), gpu, asked, lambda stage, fraction: None).shutdown()


def compile_kinds(kinds: list[tuple[str, int]]) -> None:
    """Compile the functions that widen packed rows of these kinds to float32."""
    import torch

    from gpu.operations.linear.numba_packed_linear import compile_widening

    for number, gains_per_unit in kinds:
        compile_widening(number, gains_per_unit, torch.float32)


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
