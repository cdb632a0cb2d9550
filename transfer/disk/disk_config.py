"""Define the settings of contexts on disk: the folder, how much is kept and written, and when contexts are read."""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from transfer.settings_model import Settings

BLOCK_STEP = 64  # tokens: the largest page


class DiskConfig(Settings):
    """Contexts on disk, behind host memory: prefixes of prompts are found again after their eviction and after a
    restart. A deployment without this section keeps none on disk.
    """

    folder: Path | None = Field(
        None,
        description="folder on a fast disk, used by this server alone; default: tandem/contexts in the user's cache "
        "folder",
    )
    limit_gib: float = Field(
        64.0, gt=0, description="limit of all models' files in the folder; the least recently used are evicted"
    )
    written_gib_a_day: float | None = Field(
        256.0,
        gt=0,
        description="most that is written on one day (UTC); further writes wait for the next; null: no limit",
    )
    saved_gib_a_key: float | None = Field(
        None,
        gt=0,
        description="limit of the contexts that one API key saves by name; default: a quarter of limit_gib, or all of "
        "it if there are no keys",
    )
    block_tokens: int = Field(
        256,
        description="tokens of a block, which is one file; a multiple of 64. Tokens behind the last whole block are "
        "computed again",
    )
    rows: Literal["same", "int8"] = Field(
        "same",
        description="format of keys and values on disk. `same`: as in pages. `int8`: codes with a scale for each row, "
        "half of bf16's bytes, with answers near the exact ones. Windows and states keep their format",
    )
    choose: Literal["time", "always"] = Field(
        "time",
        description="`time`: read and write a block only if that is faster than computing it, by the measured rates of "
        "the disk and of prefill. `always`: read and write every block",
    )
    threads: int = Field(4, ge=1, le=64, description="how many files are read at a time")
    memory_mib: float = Field(
        256.0, gt=0, description="pinned host memory for blocks on their way to the disk; at least two blocks"
    )

    end_seconds: float = Field(
        120.0,
        ge=0,
        description="most seconds that an engine writes contexts for when it ends or is unloaded, while that makes "
        "progress; if the server ends, within what is left of server.drain_seconds",
    )

    @field_validator("block_tokens")
    @classmethod
    def _whole_pages(cls, given: int) -> int:
        if given < BLOCK_STEP or given % BLOCK_STEP:
            raise ValueError(f"wanted a multiple of {BLOCK_STEP}, {BLOCK_STEP} or more")
        return given

    def saved_gib(self, owner: str) -> float:
        """Return the most GiB that an owner may save by name. owner: an API key's, or "" if there are no keys."""
        return self.saved_gib_a_key or self.limit_gib * (0.25 if owner else 1.0)

    @property
    def resolved_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.folder or cache / "tandem" / "contexts"
