"""Define the settings of the host tier (where offloaded KV is kept, what the device keeps, how the CPU samples) and of
documents.

Both sides of the tier read them: the device keeps sink, window and dense layers, and host memory holds the rest.
Documents' keys and values are stored on disk, for any prompt that names them.
"""

import os
from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from transfer.settings_model import Settings

MAX_BITS_PER_TABLE = 16  # codes are uint16
LEAST_AHEAD_BYTES = 2**30  # for chunks that are computed and not on disk yet, at least
_DOCUMENTS_SHARE = 1 / 16  # of host memory by default, for the chunks used last
_MOST_DOCUMENTS_BYTES = 2**33


class ErrorsConfig(Settings):
    """How estimated errors of sampled answers are handled."""

    bound: float = Field(
        0.25,
        gt=0,
        description="answers with a larger error, of the log mass or relative to the output's length, are counted",
    )
    epsilon: float | None = Field(
        None, gt=0, description="heads whose answers would have a larger error read all keys; default: no head does"
    )
    audit_steps: int = Field(
        256, ge=2, description="with `epsilon`: every so many steps a head reads all keys, to measure its error"
    )
    full_share: float = Field(
        0.05, ge=0, le=1, description="with `epsilon`: most heads of a context that read all keys beyond audits"
    )


class SampledConfig(Settings):
    """LSH sampling (MagicPIG, section 4). The paper's K is bits_per_table, its L is num_tables."""

    bits_per_table: int = Field(10, ge=1, le=MAX_BITS_PER_TABLE, description="bits of a SimHash code (the paper's K)")
    num_tables: int = Field(150, ge=2, le=512, description="hash tables for each KV head (the paper's L)")
    errors: ErrorsConfig | None = Field(
        None, description="estimate the standard errors of each answer's log mass and output; default: no estimates"
    )


class HostConfig(Settings):
    """KV in host memory. A deployment without this section keeps every context on its device."""

    memory_limit_gib: float | None = Field(None, gt=0, description="offloaded KV and tables; default: half of the host")
    threads: int | None = Field(None, gt=0, description="CPU threads of attention; default: physical cores")
    rows: Literal["bfloat16", "int8", "int4"] = Field(
        "bfloat16",
        description="format of offloaded keys and values; `int4`: each 32 dimensions have one scale and one offset",
    )
    sink_tokens: int = Field(4, ge=1, description="first tokens, kept on the device; rounded up to whole pages")
    window_tokens: int = Field(64, ge=1, description="last tokens, kept on the device; rounded up to whole pages")
    dense_layers: tuple[int, ...] | None = Field(
        None,
        description="layers whose whole KV stays on the device, for all profiles; default: layer 0 and the one at half "
        "the depth, or none if `indexed` is the default profile",
    )
    link_share: float | None = Field(
        None,
        ge=0,
        le=0.9,
        description="share of fully read tokens in host memory that the card reads over the link while the CPU reads "
        "the rest; default: by rates measured at the start, 0 without a card",
    )
    resident_tokens: int = Field(8192, ge=0, description="contexts of up to so many tokens stay on the device, exact")
    residency: Literal["adaptive", "fixed"] = Field(
        "adaptive",
        description="`adaptive`: offloaded tokens also stay on the device until other requests need their pages, so "
        "where they are read depends on the load. `fixed`: they leave at once, so the same prompt has the same answer",
    )
    sampled: SampledConfig = SampledConfig()

    @model_validator(mode="after")
    def check_link(self) -> "HostConfig":
        if self.rows == "int4" and self.link_share:
            raise ValueError(
                f"link_share: got {self.link_share} with rows: int4, which only the CPU reads; wanted 0, or int8 rows"
            )
        return self


PolicyName = Literal["a3", "random", "pie", "vanilla"]


class DocumentsConfig(Settings):
    """Documents over HTTP: their texts, and their keys and values, which are computed once and kept on disk and in
    memory.

    A deployment without this section refuses documents. Servers may share a folder.
    """

    folder: Path | None = Field(
        None, description="folder on a fast disk; default: tandem/chunks in the user's cache folder"
    )
    chunk_tokens: int = Field(
        512,
        ge=16,
        le=65536,
        description="tokens of a chunk, the unit that is stored; it ends with a sentence where one is near",
    )
    policy: PolicyName = Field(
        "a3",
        description="which tokens of a prompt with documents are computed again; requests may override it. `a3`: those "
        "that the question attends to. `random`: randomly drawn ones. `pie`: none. `vanilla`: all",
    )
    ratio: float = Field(
        0.15, ge=0, le=1, description="share of a prompt's tokens that is computed again; requests may override it"
    )
    select_layer: int = Field(
        5,
        ge=1,
        description="layer in which `a3` and `random` choose the tokens; earlier layers compute all (requests may "
        "override it). The paper chooses in layer 1, where the reference model's question does not attend to the "
        "answer yet",
    )
    seam_tokens: int = Field(
        1,
        ge=0,
        description="first tokens of each chunk that `a3` and `random` always compute again; they count towards "
        "`ratio` (requests may override it). The first token of a chunk that was computed alone attracts attention as "
        "the first token of a text does; 0, as in the paper, leaves that as it is",
    )
    max_documents: int = Field(10_000, ge=1, description="most documents of one API key; further ones are refused")
    texts_limit_mib: float = Field(1024.0, gt=0, description="limit of all documents' texts; further ones are refused")
    disk_limit_gib: float = Field(
        64.0, gt=0, description="limit of all models' files in the folder; the least recently used are evicted"
    )
    memory_limit_gib: float | None = Field(
        None,
        ge=0,
        description="host memory for the chunks used last, beside that of `host`. As much again, at least 1 GiB, holds "
        "new chunks until they are on disk. Default: a sixteenth of the host's memory, at most 8 GiB",
    )
    rows: Literal["bfloat16", "float32", "int8"] = Field(
        "bfloat16", description="format of stored keys and values; int8: with a scale for each token and KV head"
    )
    threads: int = Field(4, ge=1, le=64, description="how many layers are read from disk at a time")

    def memory_bytes(self, host_bytes: int) -> int:
        """Return the bytes for the chunks used last, on a host with `host_bytes` of memory."""
        if self.memory_limit_gib is not None:
            return int(self.memory_limit_gib * 2**30)
        return min(_MOST_DOCUMENTS_BYTES, int(host_bytes * _DOCUMENTS_SHARE))

    @property
    def resolved_folder(self) -> Path:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        return self.folder or cache / "tandem" / "chunks"
