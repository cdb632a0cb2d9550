"""What must hold before a deployment is served, and is therefore asked by `tandem plan` too: one list of refusals.

Looks at settings, at which files there are and which packages; loads no weights. The memory's own refusals are
`plan.py`'s.
"""

import json
from pathlib import Path

from gpu.model.architecture import ModelError
from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.humming_formats import require_installed
from gpu.profiles import ProfileError, get_profile, resolve_profiles
from server.config import ConfigError, Deployment
from server.documents import check_documents
from server.service import load_parts, require_tls

_INDEX = "model.safetensors.index.json"


def require_servable(deployment: Deployment) -> None:
    """Raises ModelError, ConfigError or ProfileError with one line: the library that multiplies, the model's files,
    tokenizer, template, keys, certificate, documents, profiles and the files that these name.
    """
    require_settings(deployment)
    if deployment.model.products == "humming":
        require_installed()
    path = deployment.model.path
    if path is not None:
        if not path.exists():
            raise ModelError(f"model.path: {path} is missing; put the model's Hugging Face folder or GGUF file there")
        require_weights(path)
    load_parts(deployment)
    require_tls(deployment.server)
    check_documents(deployment)
    require_method_files(deployment)


def require_method_files(deployment: Deployment) -> None:
    """Raises ProfileError unless each file is there that a method of a profile names; what is in it, loading finds."""
    for name, profile in resolve_profiles(deployment.profiles, deployment.host).items():
        for part in profile.parts:
            for key, value in part.settings:
                if isinstance(value, Path) and not value.is_file():
                    raise ProfileError(f"profiles.{name}.{part.method.slot}.{key}: got {value}; wanted a file")


def require_settings(deployment: Deployment) -> None:
    """The part that needs no file, for a machine that is elsewhere. Raises ProfileError and ConfigError."""
    profiles = resolve_profiles(deployment.profiles, deployment.host)
    get_profile(deployment.scheduler.default_profile, profiles, "scheduler.default_profile")
    documents, prefill = deployment.documents, deployment.scheduler.prefill
    most = min(prefill.chunk_tokens, prefill.max_hidden_tokens or prefill.chunk_tokens)
    if documents is not None and documents.chunk_tokens > most:  # longer ones would be computed with each prompt
        raise ConfigError(
            f"documents.chunk_tokens: asked {documents.chunk_tokens}, but a unit of prefill has {most} at most, and a "
            "chunk is no longer than one; lower it, or raise scheduler.prefill.chunk_tokens"
        )


def require_weights(folder: Path) -> None:
    """Raises ModelError unless the files are there that hold the weights; what is in them, loading finds, but of a GGUF
    file, whose header is read here.
    """
    if is_gguf(folder):
        read_gguf(folder)
        return
    index = folder / _INDEX
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            gguf = sorted(folder.glob("*.gguf"))
            instead = f"; name the file, as {gguf[0]}" if gguf else ""
            raise ModelError(
                f"model: {folder} has no *.safetensors; wanted a Hugging Face folder with its weights, or a GGUF file"
                f"{instead}"
            )
        return
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model: {index} cannot be read ({error or type(error).__name__})") from None
    missing = sorted(str(name) for name in files if not (folder / str(name)).is_file())
    if missing:
        raise ModelError(f"model: {folder / missing[0]} is missing; {_INDEX} lists it ({len(missing)} are missing)")
