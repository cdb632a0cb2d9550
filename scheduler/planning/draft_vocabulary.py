"""Check that a draft model has the vocabulary of the model it drafts for, since drafts are token ids."""

from pathlib import Path

from gpu.config import ModelConfig
from gpu.model.spec import ModelError
from gpu.model.vocabulary import read_vocabulary


def find_other_vocabulary(model: ModelConfig, vocab_size: int, draft: Path, draft_size: int) -> str | None:
    """Return why the draft model's vocabulary differs from the model's; None: it is the same.

    vocab_size, draft_size: entries of the models' logits, which may be more than there are tokens. If one model has no
    tokenizer, the sizes must be equal.
    """
    folder = model.tokenizer or model.path
    if folder is not None and folder == draft:
        return None
    try:
        own = {} if folder is None else read_vocabulary(folder)[0].get_vocab()
        theirs = read_vocabulary(draft)[0].get_vocab()
    except (ModelError, OSError):
        own, theirs = {}, {}
    if not (own and theirs):
        return None if vocab_size == draft_size else f"{draft} has {draft_size:,} tokens, the model has {vocab_size:,}"
    for token, token_id in own.items():
        other = theirs.get(token)
        if other != token_id and token_id < draft_size:
            what = "has none" if other is None else f"has it as {other}"
            return f"token {token_id} of the model is {token!r}, {draft} {what}"
    return None
