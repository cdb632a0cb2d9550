"""The tokens that end a model's texts: what its folder's files say, all together. No torch.

It refuses to know texts. Invariant: whoever serves and whoever measures a model ends its texts by the same tokens.
"""

from pathlib import Path
from typing import Any

from gpu.model.gguf.file import is_gguf
from gpu.model.gguf.header import shown
from gpu.model.gguf.tokens import gguf_end_token_ids
from gpu.model.json_files import read_object
from gpu.model.sentencepiece_file import MODEL_FILE, read_sentencepiece
from gpu.model.spec import ModelError
from gpu.model.tokenizer_settings import read_tokenizer_settings


def end_token_ids(folder: Path) -> tuple[int, ...]:
    """Of `config.json` and the decoder's part of it, `generation_config.json`, and the tokenizer's own; sorted. Of a
    GGUF file, its metadata's. Raises ModelError for a file that is no JSON object.
    """
    if is_gguf(folder):
        return gguf_end_token_ids(folder)
    config = read_object(folder / "config.json") or {}
    trees = [config, config.get("text_config"), read_object(folder / "generation_config.json")]
    objects = [tree for tree in trees if isinstance(tree, dict)]
    ids = {token_id for tree in objects for token_id in as_ids("eos_token_id", tree.get("eos_token_id"), str(folder))}
    return tuple(sorted(ids | _tokenizers_own(folder)))


def as_ids(key: str, value: Any, source: str) -> tuple[int, ...]:
    """Return the ids of a key like `eos_token_id`, which is a number, a list of them, or null. source: names the file
    in errors. Raises ModelError for anything else.
    """
    ids = value if isinstance(value, list) else [] if value is None else [value]
    wrong = [one for one in ids if type(one) is not int]
    if wrong:
        raise ModelError(f"model: {source}: {key} is {shown(wrong[0])}; wanted the id of a token, or a list of them")
    return tuple(ids)


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
