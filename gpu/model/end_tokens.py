"""Find the tokens that end a model's texts, in all files of its folder."""

from pathlib import Path

from gpu.model.config_keys import as_ids
from gpu.model.gguf.file import is_gguf
from gpu.model.gguf_translation.gguf_tokenizer import gguf_end_token_ids
from gpu.model.json_files import read_object
from gpu.model.sentencepiece_file import MODEL_FILE, read_sentencepiece
from gpu.model.spec import ModelError
from gpu.model.tokenizer_settings import read_tokenizer_settings


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids that a folder's files, or a GGUF file's metadata, name as ends of texts, sorted.

    Read are `config.json`, also the decoder's part of it, `generation_config.json` and the tokenizer's files. Raises
    ModelError for a file that is no JSON object.
    """
    if is_gguf(folder):
        return gguf_end_token_ids(folder)
    config = read_object(folder / "config.json") or {}
    trees = [config, config.get("text_config"), read_object(folder / "generation_config.json")]
    objects = [tree for tree in trees if isinstance(tree, dict)]
    ids = {token_id for tree in objects for token_id in as_ids("eos_token_id", tree.get("eos_token_id"), str(folder))}
    return tuple(sorted(ids | _tokenizers_own(folder)))


def _tokenizers_own(folder: Path) -> set[int]:
    settings = read_tokenizer_settings(folder)
    text = settings.get("eos_token")
    text = text.get("content") if isinstance(text, dict) else text
    known, added = {}, settings.get("added_tokens_decoder")
    if not (folder / "tokenizer.json").exists() and (folder / MODEL_FILE).exists():
        pieces = read_sentencepiece(folder / MODEL_FILE)
        known, text = dict(enumerate(pieces.texts)), text or pieces.text_of(pieces.eos_id)
    if isinstance(added, dict):
        if not all(token_id.isdecimal() and isinstance(token, dict) for token_id, token in added.items()):
            raise ModelError(f"model: {folder}: added_tokens_decoder: wanted an object, with its content, for each id")
        known |= {int(token_id): token.get("content") for token_id, token in added.items()}
    elif not known:
        tokens = (read_object(folder / "tokenizer.json") or {}).get("added_tokens") or []
        known = {token["id"]: token.get("content") for token in tokens}
    return {token_id for token_id, content in known.items() if content == text} if isinstance(text, str) else set()
