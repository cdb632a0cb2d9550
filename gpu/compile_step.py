"""Compile the CPU's decode step into numba's cache: `python -m gpu.compile_step SETTINGS`, a `GpuConfig` in JSON.

Loads a tiny model, whose step has the types of any other's, and runs it. Ends when its standard input does.
"""

import os
import sys
import threading

_NICE = 5  # answers come first
_TOKENS = 64


def main(settings: str) -> None:
    threading.Thread(target=_end_with_input, daemon=True).start()  # before the imports, which take seconds
    os.nice(_NICE)
    compile_step(settings)
    os._exit(0)  # the thread waits for input


def compile_step(settings: str) -> None:
    """Load the tiny model with these settings, which warms it up."""
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


def _end_with_input() -> None:
    while os.read(sys.stdin.fileno(), 1):
        pass
    os._exit(1)


if __name__ == "__main__":
    main(sys.argv[1])
