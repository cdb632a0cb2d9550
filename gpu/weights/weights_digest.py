"""Name a model's weights by a digest of their content, so that results that were computed with them are found again.

The digest is of the bytes of all safetensors files and of config.json, or of all parts of a GGUF file. Reading 16 GB
takes seconds, so each file's part is kept in the user's cache folder and used while the file's size, times and inode
are the same.
"""

import hashlib
import json
import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import xxhash

from gpu.model.architecture import ModelError
from gpu.model.gguf.file import is_gguf, part_paths

MOST_ENTRIES = 256
READ_BYTES = 8 * 2**20
NUM_THREADS = 4

log = logging.getLogger(__name__)


def kept_path() -> Path:
    """Return the file in the user's cache folder that keeps digests of files."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tandem" / "weights.json"


def digest_weights(folder: Path, kept: Path) -> str:
    """Return the digest of the model in a folder or GGUF file, 32 hexadecimal digits. kept: the file with digests that
    are known already. Raises ModelError.
    """
    is_file = is_gguf(folder)
    files = sorted(part_paths(folder) if is_file else folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model: {folder} has no *.safetensors; wanted a Hugging Face folder")
    known = _read_kept(kept)
    try:
        stamps = [_stamp(path) for path in files]
        missing = [path for path, stamp in zip(files, stamps, strict=True) if stamp not in known]
        with ThreadPoolExecutor(NUM_THREADS, "weights-digest") as threads:
            found = dict(zip(missing, threads.map(_digest_file, missing), strict=True))
        config = b"" if is_file else (folder / "config.json").read_bytes()
    except OSError as error:
        raise ModelError(f"model: {folder} cannot be read ({error}); wanted config.json and *.safetensors") from None
    parts = {stamp: found.get(path) or known[stamp] for path, stamp in zip(files, stamps, strict=True)}
    if missing:
        _keep(kept, {**known, **parts})
    whole = json.dumps([sorted(parts.values()), hashlib.blake2b(config).hexdigest()])
    return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def digest_random(shape: str, seed: int, dtype: str, device: str) -> str:
    """Return the digest of random weights. The numbers that a seed draws depend on dtype and device ("cuda", "cpu")."""
    drawn = json.dumps(["random", shape, seed, dtype, device])
    return hashlib.blake2b(drawn.encode(), digest_size=16).hexdigest()


def digest_rounded(digest: str, asked: str | None) -> str:
    """Return the digest of weights that are rounded at load to `asked`; None and "bfloat16": as they are."""
    if asked in (None, "bfloat16"):
        return digest
    return hashlib.blake2b(json.dumps([digest, asked]).encode(), digest_size=16).hexdigest()


def _stamp(path: Path) -> str:
    state = path.stat()  # follows links
    return json.dumps([str(path.resolve()), state.st_size, state.st_mtime_ns, state.st_ctime_ns, state.st_ino])


def _digest_file(path: Path) -> str:
    digest, buffer = xxhash.xxh3_128(), bytearray(READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(memoryview(buffer)[:count])
    return digest.hexdigest()


def _read_kept(kept: Path) -> dict[str, str]:
    try:
        known: Any = json.loads(kept.read_text())
    except (OSError, ValueError):
        return {}
    is_ours = isinstance(known, dict) and all(isinstance(part, str) for part in known.values())
    return known if is_ours else {}


def _keep(kept: Path, parts: dict[str, str]) -> None:
    """Write the last parts to `kept`. If that fails, the next start reads the files again."""
    written = kept.with_suffix(f".{os.getpid()}")
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        written.write_text(json.dumps(dict(list(parts.items())[-MOST_ENTRIES:]), indent=1) + "\n")
        written.replace(kept)
    except OSError as error:
        log.warning("weights_digest_not_kept path=%s error=%s", kept, error)
