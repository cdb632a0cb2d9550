"""Define the settings of contexts on disk: where they lie, how much is kept and written, and when they are read."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from transfer.settings_model import Settings

BLOCK_STEP = 64  # tokens: the largest page


class DiskConfig(Settings):
    """Contexts on disk, below host memory: prefixes of prompts are found again after they were evicted, and after a
    restart. A deployment without this section keeps none.
    """

    folder: Path | None = Field(
        None, description="on a fast disk, of this server alone; default: tandem/contexts in the user's cache folder"
    )
    limit_gib: float = Field(64.0, gt=0, description="of all models in the folder; the least recently used go")
    written_gib_a_day: float | None = Field(
        256.0, gt=0, description="most that is written on one day (UTC); then nothing is until the next; null: any"
    )
    saved_gib_a_key: float | None = Field(
        None,
        gt=0,
        description="of contexts saved by name, of one API key; default: a quarter of limit_gib, and all of it where "
        "there are no keys",
    )
    block_tokens: int = Field(
        256, description="of a block, a file of its own; a multiple of 64. What is behind the last one is computed"
    )
    rows: Literal["same", "int8"] = Field(
        "same",
        description="of keys and values there: `same` as in pages, or `int8`, codes with a scale a row: half of bf16's "
        "bytes, and answers that are near the exact ones. Windows and states stay as they are",
    )
    choose: Literal["time", "always"] = Field(
        "time",
        description="read, and write, a block where that is faster than to compute it, by the disk's measured rate and "
        "prefill's (`time`), or whenever there is one (`always`)",
    )
    threads: int = Field(4, ge=1, le=64, description="files that are read at a time")
    memory_mib: float = Field(
        256.0, gt=0, description="of pinned host memory for blocks on their way to the disk; two blocks at the least"
    )

    end_seconds: float = Field(
        120.0,
        ge=0,
        description="an engine that ends or is unloaded writes contexts for so long at most, as long as that makes "
        "progress; within what is left of server.drain_seconds where the server ends",
    )

    @field_validator("block_tokens")
    @classmethod
    def _whole_pages(cls, given: int) -> int:
        if given < BLOCK_STEP or given % BLOCK_STEP:
            raise ValueError(f"wanted a multiple of {BLOCK_STEP}, {BLOCK_STEP} or more")
        return given

    def saved_gib(self, owner: str) -> float:
        """Return the most that an owner may save by name; "": there are no keys."""
        return self.saved_gib_a_key or self.limit_gib * (0.25 if owner else 1.0)

    @property
    def resolved_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.folder or cache / "tandem" / "contexts"
