"""Read a folder's vocabulary of tokens, as `tokenizers` has it, whichever file it is in."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Vocabulary

from gpu.model.gguf.file import is_gguf
from gpu.model.gguf_translation.gguf_tokenizer import read_gguf_vocabulary
from gpu.model.sentencepiece_file import MODEL_FILE, read_sentencepiece
from gpu.model.sentencepiece_vocabulary import build_vocabulary
from gpu.model.spec import ModelError
from gpu.model.tokenizer_settings import read_tokenizer_settings


def read_vocabulary(folder: Path) -> tuple[Vocabulary, dict[str, Any]]:
    """Return the vocabulary of tokenizer.json, or else of sentencepiece's tokenizer.model, and the settings that
    `read_tokenizer_settings` finds; of a GGUF file, both from its metadata. Raises ModelError if there is neither, or
    one is broken.
    """
    if is_gguf(folder):
        return read_gguf_vocabulary(folder)
    settings = read_tokenizer_settings(folder)
    path = folder / "tokenizer.json"
    if path.is_file():
        return _read(path), settings
    if (folder / MODEL_FILE).is_file():
        return _read_sentencepiece(folder, settings), settings
    raise ModelError(f"{path} is missing, and so is {MODEL_FILE}; set model.tokenizer to a folder that has one")


def token_text(setting: object) -> str | None:
    """Return a token's text. Older tokenizer_config.json files write a token as an object with its `content`."""
    if isinstance(setting, dict):
        setting = setting.get("content")
    return setting if isinstance(setting, str) else None


def _read(path: Path) -> Vocabulary:
    try:
        return Vocabulary.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"{path} cannot be read: {' '.join(str(error).split())}") from None


def _read_sentencepiece(folder: Path, settings: dict[str, Any]) -> Vocabulary:
    """Begin and end tokens that the settings do not name are those of the file."""
    pieces = read_sentencepiece(folder / MODEL_FILE)
    for name, piece_id in (("bos_token", pieces.bos_id), ("eos_token", pieces.eos_id), ("unk_token", pieces.unk_id)):
        settings[name] = token_text(settings.get(name)) or pieces.text_of(piece_id)
    return build_vocabulary(pieces, folder, settings)
