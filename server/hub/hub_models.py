"""Fetch models by name into the hub's cache folder, and list those in it.

`huggingface_hub` does the work, so its variables HF_HOME, HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE apply.
An interrupted download is continued.
"""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from httpx2 import TransportError
from huggingface_hub import HfApi, constants, get_cached_repo_tree, scan_cache_dir, snapshot_download
from huggingface_hub.errors import (
    CachedRepoTreeNotFoundError,
    CacheNotFound,
    GatedRepoError,
    HfHubHTTPError,
    IncompleteSnapshotError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from server import logs
from server.deployment import HUB_PREFIX
from server.hub.hub_name import HubError, HubName, choose_files, find_gguf, quant_of

_ANSWER_SECONDS = 15.0  # of the hub, before what was fetched is served
_ABSENT = (CachedRepoTreeNotFoundError, IncompleteSnapshotError, LocalEntryNotFoundError)


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache folder: its name, the folder or file to open, and the bytes of its weights."""

    name: str
    path: Path
    size_bytes: int


def fetch_model(name: HubName, is_offline: bool = False, cache: Path | None = None) -> Path:
    """Fetch missing files of a model, and return its folder or GGUF file in the cache folder.

    is_offline: do not contact the hub. Raises HubError.
    """
    is_offline = is_offline or constants.HF_HUB_OFFLINE
    with _telling(name, is_offline):
        files, is_cached = _list_files(name, is_offline, cache)
        chosen, opened = choose_files(name, files)
        folder = snapshot_download(
            name.repository,
            revision=name.revision,
            allow_patterns=[glob.escape(file) for file in chosen],
            cache_dir=cache,
            local_files_only=is_cached,
        )
    return Path(folder) / opened


def list_cached(cache: Path | None = None) -> list[CachedModel]:
    """Return the models in the cache folder, by name; of several revisions, the one that was fetched last."""
    try:
        repositories = scan_cache_dir(cache).repos
    except CacheNotFound:
        return []
    found: list[CachedModel] = []
    for repository in repositories:
        revisions = [revision for revision in repository.revisions if repository.repo_type == "model"]
        if revisions:
            last = max(revisions, key=lambda revision: revision.last_modified)
            found += _models_in(repository.repo_id, last.snapshot_path)
    return sorted(found, key=lambda model: model.name)


def cache_folder() -> Path:
    return Path(constants.HF_HUB_CACHE)


def _models_in(repository: str, folder: Path) -> Iterator[CachedModel]:
    """Yield the models in a fetched revision that can be served."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in folder.rglob("*") if path.is_file()}
    weights = [size for file, size in sizes.items() if file.endswith(".safetensors") and "/" not in file]
    if "config.json" in sizes and weights:
        yield CachedModel(f"{HUB_PREFIX}{repository}", folder, sum(weights))
    for file in find_gguf(sizes):
        quant = quant_of(file)
        is_alone = [quant_of(other) for other in find_gguf(sizes)].count(quant) == 1
        name = HubName(repository, None, quant if quant and is_alone else file)
        parts, _ = choose_files(name, sizes)
        yield CachedModel(str(name), folder / file, sum(sizes[part] for part in parts))


def _list_files(name: HubName, is_offline: bool, cache: Path | None) -> tuple[list[str], bool]:
    """Return the names of a model's files, and whether they were taken from the cache folder only."""
    if not is_offline:
        try:
            # One request without the library's retries, which take 23 s where there is no network.
            known = HfApi().model_info(name.repository, revision=name.revision, timeout=_ANSWER_SECONDS).siblings
            return [file.rfilename for file in known or ()], False
        except TransportError as error:
            try:
                found = _list_cached_files(name, cache)
            except _ABSENT:
                raise error from None
            logs.warning("hub_unreachable", model=str(name), reason=str(error), served="what was fetched before")
            return found, True
    return _list_cached_files(name, cache), True


def _list_cached_files(name: HubName, cache: Path | None) -> list[str]:
    tree = get_cached_repo_tree(name.repository, revision=name.revision, cache_dir=cache)
    return [entry.path for entry in tree]


@contextmanager
def _telling(name: HubName, is_offline: bool) -> Iterator[None]:
    """Turn the library's errors into a line each."""
    hub = constants.ENDPOINT
    try:
        yield
    except GatedRepoError:
        raise HubError(
            f"{name}: gated; accept its terms at {hub}/{name.repository}, and set HF_TOKEN to a token of that account"
        ) from None
    except RepositoryNotFoundError:
        raise HubError(
            f"{name}: {hub} has no such model, or shows it to some accounts alone; correct the name, or set HF_TOKEN"
        ) from None
    except RevisionNotFoundError:
        raise HubError(f"{name}: the model has no revision {name.revision!r}") from None
    except (OfflineModeIsEnabled, *_ABSENT):
        why = "--offline or HF_HUB_OFFLINE keeps it from the network" if is_offline else f"{hub} cannot be reached"
        raise HubError(
            f"{name}: not in {cache_folder()}, or incomplete, and {why}; fetch it once with a network"
        ) from None
    except TransportError as error:
        raise HubError(
            f"{name}: {hub} cannot be reached ({' '.join(str(error).split()) or type(error).__name__}), and "
            f"{cache_folder()} does not have the model; is there a network? HF_ENDPOINT names another hub"
        ) from None
    except HfHubHTTPError as error:
        raise HubError(f"{name}: {hub} answers {' '.join(str(error).split())[:200]}") from None
