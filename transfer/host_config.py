"""Define the settings of the host tier (where offloaded KV lives, what the device keeps, how the CPU samples) and of
documents.

Both sides of the tier read them: the device keeps sink, window and dense layers, the CPU holds the rest. Documents'
keys and values are kept on disk, for any prompt that names them.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from transfer.settings_model import Settings

MAX_BITS_PER_TABLE = 16  # codes are uint16
LEAST_AHEAD_BYTES = 2**30  # of chunks that are computed before they are on disk, whatever is kept of them in memory
_DOCUMENTS_SHARE = 1 / 16  # of host memory, where nobody says, for chunks used last
_MOST_DOCUMENTS_BYTES = 2**33


class ErrorsConfig(Settings):
    """How errors of sampled answers are handled."""

    bound: float = Field(
        0.25,
        gt=0,
        description="answers whose error, of log mass or as a share of the output's length, is beyond this are counted",
    )
    epsilon: float | None = Field(
        None, gt=0, description="a head whose answers would have a larger error is read in full; default: none is"
    )
    audit_steps: int = Field(
        256, ge=2, description="with `epsilon`: a head is read in full every so many steps, to know what it would have"
    )
    full_share: float = Field(
        0.05, ge=0, le=1, description="with `epsilon`: of a context's heads, the most that are read in full beyond that"
    )


class SampledConfig(Settings):
    """LSH sampling, MagicPIG section 4; paper: K = bits_per_table, L = num_tables."""

    bits_per_table: int = Field(10, ge=1, le=MAX_BITS_PER_TABLE, description="bits of a SimHash code (the paper's K)")
    num_tables: int = Field(150, ge=2, le=512, description="hash tables a KV head (the paper's L)")
    errors: ErrorsConfig | None = Field(
        None, description="with this, each answer's standard error is estimated, of its log mass and of its output"
    )


class HostConfig(Settings):
    """KV in host memory. A deployment without this section keeps every context on its device."""

    memory_limit_gib: float | None = Field(None, gt=0, description="offloaded KV and tables; default: half of the host")
    threads: int | None = Field(None, gt=0, description="CPU threads of attention; default: physical cores")
    rows: Literal["bfloat16", "int8", "int4"] = Field(
        "bfloat16",
        description="how offloaded keys and values are kept; `int4`: 32 dimensions have one scale and one offset each",
    )
    sink_tokens: int = Field(4, ge=1, description="first tokens, kept on the device; rounded up to whole pages")
    window_tokens: int = Field(64, ge=1, description="last tokens, kept on the device; rounded up to whole pages")
    dense_layers: tuple[int, ...] | None = Field(
        None, description="layers whose KV stays on the device, whole; default: 0 and half the depth"
    )
    link_share: float | None = Field(
        None,
        ge=0,
        le=0.9,
        description="of the tokens that attention reads in full in host memory, what the card reads "
        "over the link while the CPU reads the rest; default: by rates measured at the start, 0 without a card",
    )
    resident_tokens: int = Field(8192, ge=0, description="a context up to this stays on the device and is exact")
    residency: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="what is written to host memory stays on the device as well while nobody needs its pages "
        "(`adaptive`: what is read where depends on the load), or leaves at once (`fixed`: same prompt, same answer)",
    )
    sampled: SampledConfig = SampledConfig()

    @model_validator(mode="after")
    def check_link(self) -> "HostConfig":
        if self.rows == "int4" and self.link_share:
            raise ValueError(
                f"link_share: got {self.link_share} beside rows: int4, which only the CPU reads; wanted 0, or int8 rows"
            )
        return self


PolicyName = Literal["a3", "random", "pie", "vanilla"]


class DocumentsConfig(Settings):
    """Documents over HTTP: their texts, and their keys and values, computed once, kept on disk and in memory.

    A deployment without this section refuses them. Servers may share a folder.
    """

    folder: Path | None = Field(None, description="on a fast disk; default: tandem/chunks in the user's cache folder")
    chunk_tokens: int = Field(
        512,
        ge=16,
        le=65536,
        description="of a chunk, the unit that is stored; it ends with a sentence where one is near",
    )
    policy: PolicyName = Field(
        "a3",
        description="which tokens of a prompt are computed again where it reuses documents; requests may say another. "
        "`a3`: those that the question attends to. `random`: drawn ones. `pie`: none. `vanilla`: all",
    )
    ratio: float = Field(0.15, ge=0, le=1, description="of a prompt's tokens, computed again; requests may say another")
    select_layer: int = Field(
        5,
        ge=1,
        description="in which the tokens are chosen, of `a3` and `random`; the layers before compute all "
        "(requests may say another). The paper chooses in 1, where the reference model's question does not look at "
        "what it asks for yet",
    )
    seam_tokens: int = Field(
        1,
        ge=0,
        description="first tokens of each chunk that are always computed again, of `a3` and `random`; "
        "counted to `ratio` (requests may say another). The first token of a chunk that was computed alone draws "
        "attention as the first token of a text does; 0, as in the paper, leaves it as it was",
    )
    max_documents: int = Field(10_000, ge=1, description="of one API key; one more is refused")
    texts_limit_mib: float = Field(1024.0, gt=0, description="of all documents' texts; one more is refused")
    disk_limit_gib: float = Field(64.0, gt=0, description="of all models in the folder; the least recently used go")
    memory_limit_gib: float | None = Field(
        None,
        ge=0,
        description="of host memory for the last used ones, beside `host`'s own; for as much again, 1 GiB at least, "
        "new ones are computed before they are on disk; default: a sixteenth of the host's, 8 at most",
    )
    rows: Literal["bfloat16", "float32", "int8"] = Field(
        "bfloat16", description="how keys and values are kept; int8: with a scale for each token and KV head"
    )
    threads: int = Field(4, ge=1, le=64, description="layers that are read from the disk at a time")

    def memory_bytes(self, host_bytes: int) -> int:
        """Return the bytes for chunks used last, on a host with so much memory."""
        if self.memory_limit_gib is not None:
            return int(self.memory_limit_gib * 2**30)
        return min(_MOST_DOCUMENTS_BYTES, int(host_bytes * _DOCUMENTS_SHARE))

    @property
    def resolved_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.folder or cache / "tandem" / "chunks"
