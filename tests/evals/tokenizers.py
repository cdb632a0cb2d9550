"""Two tokenizers of quite different grain for tests: bytes, and words of a small vocabulary. No files, no network."""

from typing import Any


class ByteTokenizer:
    """A token a byte, with a begin token; a chat template of fixed words."""

    chat_template = "{{ messages }}"

    def __call__(self, text: str, verbose: bool = True, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [256] * add_special_tokens + list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool, tokenize: bool) -> str:
        return "".join(f"<user>{message['content']}</user>" for message in messages) + "<assistant>"

    def tokenize(self, text: str) -> list[str]:
        return list(text)

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in ids if token < 256).decode(errors="ignore")


class SpaceTokenizer:
    """A token a run of non-blanks; no chat template."""

    chat_template: Any = None

    def __call__(self, text: str, verbose: bool = True, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [hash(word) % 50_000 for word in text.split()]}

    def tokenize(self, text: str) -> list[str]:
        return text.split()
