"""Settings of the host tier (where deposited KV lives, what the device keeps, how the CPU samples) and of documents.

Both sides of the tier read them: the device keeps sink, window and dense layers, the CPU holds the rest. Documents'
keys and values are kept on disk, for whatever prompt they come in.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field

from transfer.settings import Settings

MAX_BITS_PER_TABLE = 16  # codes are uint16


class SampledConfig(Settings):
    """LSH sampling, MagicPIG section 4; paper: K = bits_per_table, L = num_tables."""

    bits_per_table: int = Field(10, ge=1, le=MAX_BITS_PER_TABLE, description="bits of a SimHash code (the paper's K)")
    num_tables: int = Field(150, ge=2, le=512, description="hash tables a KV head (the paper's L)")


class HostConfig(Settings):
    """KV in host memory. A deployment without this section keeps every context on its device."""

    memory_limit_gib: float | None = Field(None, gt=0, description="deposited KV and tables; default: half of the host")
    threads: int | None = Field(None, gt=0, description="CPU threads of attention; default: physical cores")
    rows: Literal["bfloat16", "int8"] = Field("bfloat16", description="how deposited keys and values are kept")
    sink_tokens: int = Field(4, ge=1, description="first tokens, kept on the device; rounded up to whole pages")
    window_tokens: int = Field(64, ge=1, description="last tokens, kept on the device; rounded up to whole pages")
    dense_layers: tuple[int, ...] | None = Field(
        None, description="layers whose KV stays on the device, whole; default: 0 and half the depth"
    )
    resident_tokens: int = Field(8192, ge=0, description="a context up to this stays on the device and is exact")
    residency: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="what is written to host memory stays on the device as well while nobody needs its pages "
        "(`adaptive`: what is read where depends on the load), or leaves at once (`fixed`: same prompt, same answer)",
    )
    sampled: SampledConfig = SampledConfig()


class DocumentsConfig(Settings):
    """Documents' keys and values, computed once, kept on disk and in memory. Servers may share a folder."""

    folder: Path | None = Field(None, description="on a fast disk; default: tandem/chunks in the user's cache folder")
    disk_limit_gib: float = Field(64.0, gt=0, description="of all models in the folder; the least recently used go")
    memory_limit_gib: float = Field(8.0, ge=0, description="of host memory for the last used ones, beside `host`'s own")
    rows: Literal["bfloat16", "float32", "int8"] = Field(
        "bfloat16", description="how keys and values are kept; int8: with a scale for each token and KV head"
    )
    threads: int = Field(4, ge=1, le=64, description="layers that are read from the disk at a time")

    @property
    def resolved_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.folder or cache / "tandem" / "chunks"
