"""The tokenizer of a model: a Hugging Face folder's, or that of a GGUF file's vocabulary. Knows no text and no task."""

import sys
from pathlib import Path
from typing import Any

from gpu.model.gguf.file import is_gguf
from gpu.model.vocabulary import read_vocabulary


def load_tokenizer(model: Path) -> Any:
    """The Hugging Face tokenizer of a model folder, or of a GGUF file's vocabulary. It knows no longest text: texts are
    tokenised before they are cut, of which transformers would warn.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(model):
        vocabulary, settings = read_vocabulary(model)
        names = {name: text for name, text in settings.items() if name.endswith("_token") and isinstance(text, str)}
        return PreTrainedTokenizerFast(
            tokenizer_object=vocabulary, chat_template=settings.get("chat_template"), **names
        )  # fmt: skip
    return AutoTokenizer.from_pretrained(model, model_max_length=sys.maxsize)
