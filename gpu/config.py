"""Settings of the device side: the model and where it runs. Resolving against the machine returns a new tree."""

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from transfer.settings import Settings


class ModelConfig(Settings):
    """A Hugging Face folder, or random weights of a named shape (for benchmarks without a checkpoint)."""

    path: Path | None = Field(None, description="folder with config.json, *.safetensors and the tokenizer")
    random_weights: str | None = Field(None, description="a named shape, for instance llama-3.1-8b")
    tokenizer: Path | None = Field(None, description="folder of the tokenizer; defaults to `path`")
    name: str | None = Field(None, description="the id in /v1/models; defaults to the folder's or the shape's name")
    aliases: tuple[str, ...] = Field((), description="further ids by which requests may name the model")
    shape: str | None = Field(None, description="named shape to plan with while the folder `path` is not there yet")
    chat_template: Path | None = Field(None, description="jinja file; defaults to the tokenizer's own")

    @model_validator(mode="after")
    def _one_source(self) -> "ModelConfig":
        if (self.path is None) == (self.random_weights is None):
            raise ValueError("model: give either `path` or `random_weights`, and not both")
        return self

    @model_validator(mode="after")
    def _distinct_ids(self) -> "ModelConfig":
        ids = [self.name or self.random_weights or (self.path.name if self.path else ""), *self.aliases]
        for i, alias in enumerate(self.aliases):
            if not alias or alias in ids[: i + 1]:
                raise ValueError(f"aliases: got {alias!r}; wanted further ids, none of them empty or there twice")
        return self


class GpuConfig(Settings):
    """One device. What is None is derived from the machine."""

    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "bfloat16", "float32"] = Field("auto", description="auto: bfloat16 on cuda, float32 on cpu")
    memory_limit_gib: float | None = Field(None, gt=0, description="of device memory, all included")
    kv_cache_gib: float | None = Field(None, gt=0, description="KV pages; default: what the limit leaves")
    page_tokens: Literal[16, 32, 64] = 16
    graph_batch_sizes: tuple[int, ...] = Field((1, 2, 4, 8, 16, 24, 32, 48, 64), description="CUDA graphs of decode")
    threads: int | None = Field(None, gt=0, description="CPU threads of torch; default: physical cores")
