"""What must hold before a deployment is served, and is therefore asked by `tandem plan` too: one list of refusals.

Looks at settings and at which files there are; loads no weights. The memory's own refusals are `plan.py`'s.
"""

import json
from pathlib import Path

from gpu.architecture import ModelError
from server.config import ConfigError, Deployment
from server.service import load_parts
from transfer.config import DEVICE_PROFILES, HOST_PROFILES

_INDEX = "model.safetensors.index.json"


def require_servable(deployment: Deployment) -> None:
    """Raises ModelError or ConfigError with one line: the model's files, tokenizer, template, keys, default profile."""
    require_settings(deployment)
    path = deployment.model.path
    if path is not None:
        if not path.exists():
            raise ModelError(f"model.path: {path} is missing; put the model's Hugging Face folder there")
        require_weights(path)
    load_parts(deployment)


def require_settings(deployment: Deployment) -> None:
    """The part that needs no file, for a machine that is elsewhere. Raises ConfigError."""
    profile = deployment.scheduler.default_profile
    if profile in HOST_PROFILES and deployment.host is None:
        raise ConfigError(
            f"scheduler.default_profile: {profile!r} keeps KV in host memory; this deployment has no `host` section"
        )
    if profile not in (*DEVICE_PROFILES, *HOST_PROFILES):
        known = (*DEVICE_PROFILES, *(HOST_PROFILES if deployment.host is not None else ()))
        raise ConfigError(f"scheduler.default_profile: unknown profile {profile!r}; known: {', '.join(known)}")


def require_weights(folder: Path) -> None:
    """Raises ModelError unless the files are there that hold the weights; what is in them, loading finds."""
    index = folder / _INDEX
    if not index.is_file():
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"model: {folder} has no *.safetensors; wanted a Hugging Face folder with its weights")
        return
    try:
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"model: {index} cannot be read ({error or type(error).__name__})") from None
    missing = sorted(str(name) for name in files if not (folder / str(name)).is_file())
    if missing:
        raise ModelError(f"model: {folder / missing[0]} is missing; {_INDEX} lists it ({len(missing)} are missing)")
