"""Read names of models on a hub, `hf:OWNER/NAME[@REVISION][:FILE or QUANT]`, and choose the files that a name means."""

import re
from collections.abc import Collection
from dataclasses import dataclass

from server.deployment import HUB_PREFIX

WANTED = "wanted hf:OWNER/NAME, hf:OWNER/NAME:FILE.gguf or hf:OWNER/NAME:QUANT, with @REVISION behind NAME"
_NAME = re.compile(r"hf:([\w.-]+/[\w.-]+)(?:@([\w./-]+))?(?::([\w./-]+))?")
_QUANT = re.compile(r"[-._]((?:I?Q|TQ)\d\w*|BF16|F16|F32|MXFP4\w*)(?:-\d{5}-of-\d{5})?\.gguf", re.IGNORECASE)
_PART = re.compile(r"(.*)-(\d{5})-of-\d{5}\.gguf")
_PREFERRED = "Q4_K_M"
_MOST_NAMED = 12

# What a folder is served from, beside its *.safetensors.
FOLDER_FILES = re.compile(
    r"config\.json|generation_config\.json|model\.safetensors\.index\.json|tokenizer.*|special_tokens_map\.json"
    r"|added_tokens\.json|vocab\.(json|txt)|merges\.txt|chat_template.*|.*\.jinja|1_Pooling/config\.json"
)


class HubError(Exception):
    """A model cannot be found or fetched by its name; the message is one line."""


@dataclass(frozen=True, slots=True)
class HubName:
    """A model's name on the hub. choice: one of its GGUF files, or a quant; None: its folder, or its only GGUF file."""

    repository: str
    revision: str | None
    choice: str | None

    def __str__(self) -> str:
        revision = f"@{self.revision}" if self.revision else ""
        return f"{HUB_PREFIX}{self.repository}{revision}{f':{self.choice}' if self.choice else ''}"


def read_name(text: str) -> HubName:
    """Read a name. Raises HubError."""
    found = _NAME.fullmatch(text)
    if found is None:
        raise HubError(f"model: got {text!r}, {WANTED}")
    return HubName(found[1], found[2], found[3])


def choose_files(name: HubName, files: Collection[str]) -> tuple[list[str], str]:
    """Return the files to fetch, and the one by which the model is opened; "": their folder.

    Safetensors are preferred to GGUF files. Raises HubError if no file can be served, or several might be meant.
    """
    weights = [file for file in files if file.endswith(".safetensors") and "/" not in file]
    if name.choice is None and "config.json" in files and weights:
        return sorted([*weights, *filter(FOLDER_FILES.fullmatch, files)]), ""
    first_parts = find_gguf(files)
    if not first_parts:
        raise HubError(f"{name}: it has neither config.json with *.safetensors nor a *.gguf; wanted one of them")
    first = _choose_gguf(name, first_parts)
    part = _PART.fullmatch(first)
    if part is None:
        return [first], first
    return sorted(file for file in files if (one := _PART.fullmatch(file)) and one[1] == part[1]), first


def find_gguf(files: Collection[str]) -> list[str]:
    """Return the GGUF files that are models; of a model in several parts, the first."""
    found = [file for file in files if file.endswith(".gguf") and "mmproj" not in file.lower()]
    return sorted(file for file in found if (part := _PART.fullmatch(file)) is None or int(part[2]) == 1)


def quant_of(file: str) -> str | None:
    """Return the quant in a GGUF file's name, in capitals."""
    found = _QUANT.search(file)
    return None if found is None else found[1].upper()


def _choose_gguf(name: HubName, files: list[str]) -> str:
    if name.choice is None:
        found = files if len(files) == 1 else [file for file in files if quant_of(file) == _PREFERRED]
    else:
        found = [file for file in files if name.choice in (file, file.removesuffix(".gguf"))]
        found = found or [file for file in files if quant_of(file) == name.choice.upper()]
    if len(found) == 1:
        return found[0]
    shown = [quant_of(file) or file for file in found or files]
    if len(set(shown)) < len(shown):
        shown = found or files
    more = f" and {len(shown) - _MOST_NAMED} more" if len(shown) > _MOST_NAMED else ""
    what = "several files match" if name.choice is None else f"{len(found) or 'none'} of its files are that"
    raise HubError(f"{name}: {what}; wanted one of {', '.join(shown[:_MOST_NAMED])}{more} behind a colon")
