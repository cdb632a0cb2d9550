"""Runners with a few slots and pages, for tests."""

from collections.abc import Callable
from typing import Any

from gpu.config import GpuConfig, ModelConfig
from gpu.load import load_runner
from gpu.runner import Runner
from gpu.runner_settings import LoadSettings

SIZES: dict[str, Any] = {
    "max_running": 8, "max_context_tokens": 512, "chunk_tokens": 16, "max_hidden_tokens": 1024, "num_pages": 70,
}  # fmt: skip


def load_small(
    model: ModelConfig,
    gpu: GpuConfig,
    on_progress: Callable[[str, float], None] = lambda stage, fraction: None,
    **settings: Any,
) -> Runner:
    """Return a runner of SIZES; settings: of LoadSettings, in their place."""
    return load_runner(model, gpu, LoadSettings(**(SIZES | settings)), on_progress)
