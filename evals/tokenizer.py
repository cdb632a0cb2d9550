"""Load the tokenizer of a model, from a Hugging Face folder or from the vocabulary of a GGUF file."""

import sys
from pathlib import Path
from typing import Any

from gpu.model.gguf.file import is_gguf
from gpu.model.vocabulary import read_vocabulary


def load_tokenizer(model: Path) -> Any:
    """Return the Hugging Face tokenizer of a model folder, or of a GGUF file's vocabulary.

    It has no maximum length: texts are tokenised before they are cut, and transformers would warn of long ones.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if is_gguf(model):
        vocabulary, settings = read_vocabulary(model)
        names = {name: text for name, text in settings.items() if name.endswith("_token") and isinstance(text, str)}
        return PreTrainedTokenizerFast(
            tokenizer_object=vocabulary, chat_template=settings.get("chat_template"), **names
        )  # fmt: skip
    return AutoTokenizer.from_pretrained(model, model_max_length=sys.maxsize)
