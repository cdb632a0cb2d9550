"""Check a deployment before it is served or planned by `tandem plan`.

Settings, files' headers and packages are checked, and no weights are loaded. Memory is checked by `plan.py`.
"""

import subprocess
import sys
from pathlib import Path

from gpu.config import ModelConfig
from gpu.model.architecture import ModelError
from gpu.model.gguf.file import is_gguf, read_gguf
from gpu.model.humming_formats import require_installed
from gpu.model.safetensors_index import find_files
from gpu.profiles import ProfileError, get_profile, resolve_profiles
from server.deployment import ConfigError, Deployment
from server.service.service import load_parts, require_tls
from server.stores.document_texts import check_documents

TENSOR_CHECK = (sys.executable, "-m", "gpu.weights.tensor_check")
TENSORS_REFUSED = 3  # its status, `gpu.weights.tensor_check.REFUSED`


def require_servable(deployment: Deployment) -> None:
    """Check everything that serving needs: libraries, the model's files, tokenizer, template, keys, certificate,
    documents and profiles.

    Raises ModelError, ConfigError or ProfileError with one line.
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
    """Check that each file exists that a method of a profile names. Raises ProfileError."""
    for name, profile in resolve_profiles(deployment.all_profiles, deployment.host).items():
        for part in profile.parts:
            for key, value in part.settings:
                if isinstance(value, Path) and not value.is_file():
                    raise ProfileError(f"profiles.{name}.{part.method.slot}.{key}: got {value}; wanted a file")


def require_settings(deployment: Deployment) -> None:
    """Check what needs no file, for a machine that is elsewhere. Raises ProfileError and ConfigError."""
    profiles = resolve_profiles(deployment.all_profiles, deployment.host)
    get_profile(deployment.default_profile, profiles, "scheduler.default_profile")
    documents, prefill = deployment.documents, deployment.scheduler.prefill
    most = min(prefill.chunk_tokens, prefill.max_hidden_tokens or prefill.chunk_tokens)
    if documents is not None and documents.chunk_tokens > most:  # longer ones would be computed with each prompt
        raise ConfigError(
            f"documents.chunk_tokens: got {documents.chunk_tokens}; wanted at most {most}, a prefill unit's; "
            "lower it, or raise scheduler.prefill.chunk_tokens"
        )


def require_weights(folder: Path) -> None:
    """Check that the weight files exist, each of them whole by its header. Raises ModelError."""
    if is_gguf(folder):
        read_gguf(folder)
    else:
        find_files(folder)


def require_tensors(model: ModelConfig, drafts: bool = False) -> None:
    """Check that the files' headers list all tensors of the model, with those of the draft head if it `drafts`.

    Loading begins with the same check. It needs torch, so a child process makes it. Raises ModelError.
    """
    if model.path is None:
        return
    check = (*TENSOR_CHECK, "mtp") if drafts else TENSOR_CHECK
    asked = subprocess.run(check, input=model.model_dump_json(), capture_output=True, text=True, check=False)
    if asked.returncode == TENSORS_REFUSED:
        raise ModelError(asked.stdout.strip())
    if asked.returncode:
        last = (asked.stderr.strip().splitlines() or [f"status {asked.returncode}"])[-1]
        raise ModelError(f"model: the tensors of {model.path} could not be checked ({last})")
