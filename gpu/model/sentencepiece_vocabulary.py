"""Make a vocabulary of `tokenizers` of a sentencepiece `tokenizer.model`.

A text gets the ids that sentencepiece gives it. Around tokens that the folder adds to the model's pieces, in
`added_tokens.json` and `tokenizer_config.json`, each part is a text of its own, as in transformers.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Vocabulary

from gpu.model.json_files import read_object
from gpu.model.sentencepiece_file import Kind, SentencepieceFile
from gpu.model.spec import ModelError

_SPACE = "▁"  # how sentencepiece spells one
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")


def build_vocabulary(pieces: SentencepieceFile, folder: Path, settings: Mapping[str, Any]) -> Vocabulary:
    """Return the vocabulary of a folder. settings: of `tokenizer_config.json`, its end and begin tokens filled in.
    Raises ModelError for tokens whose ids cannot be what the folder says.
    """
    return assemble_vocabulary(pieces, _added_tokens(folder, settings), str(folder), settings)


def assemble_vocabulary(
    pieces: SentencepieceFile, added: dict[int, AddedToken], source: str, settings: Mapping[str, Any]
) -> Vocabulary:
    """Return a vocabulary as `build_vocabulary`. added: tokens by id; source: names them in errors."""
    added = dict(added)
    texts = [added[place].content if place in added else text for place, text in enumerate(pieces.texts)]
    vocabulary = Vocabulary(_model(pieces, texts))
    vocabulary.normalizer, vocabulary.pre_tokenizer = _spelling(pieces, settings)
    strip = [decoders.Strip(" ", 1, 0)] if pieces.adds_prefix else []
    vocabulary.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    for place, kind in enumerate(pieces.kinds):
        is_special = kind in (Kind.CONTROL, Kind.UNKNOWN)
        if place not in added and (is_special or (kind == Kind.USER_DEFINED and _SPACE not in texts[place])):
            added[place] = AddedToken(texts[place], normalized=False, special=is_special)
    for place in sorted(added):
        vocabulary.add_tokens([added[place]])
        got = vocabulary.token_to_id(added[place].content)
        if got != place:
            raise ModelError(
                f"model: {source}: added token {added[place].content!r} is {place}, and would be {got} behind "
                f"{len(texts)} pieces; wanted ids without a gap: put a tokenizer.json into the folder"
            )
    _frame(vocabulary, settings)
    return vocabulary


def _model(pieces: SentencepieceFile, texts: list[str]) -> models.Model:
    if not pieces.is_bpe:
        scored = list(zip(texts, pieces.scores, strict=True))
        return models.Unigram(scored, unk_id=pieces.unk_id, byte_fallback=pieces.has_byte_fallback)
    return models.BPE(
        vocab={text: place for place, text in enumerate(texts)}, merges=_merges(pieces, texts), fuse_unk=True,
        unk_token=None if pieces.unk_id is None else texts[pieces.unk_id], byte_fallback=pieces.has_byte_fallback,
    )  # fmt: skip


def _merges(pieces: SentencepieceFile, texts: list[str]) -> list[tuple[str, str]]:
    """Return every pair of pieces that make a piece, those of the highest score first: sentencepiece has no merges."""
    is_made = (Kind.NORMAL, Kind.USER_DEFINED)
    places = {text: place for place, text in enumerate(texts) if pieces.kinds[place] in is_made}
    found = []
    for text, place in places.items():
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in places and right in places:
                found.append((-pieces.scores[place], places[left], places[right]))
    return [(texts[left], texts[right]) for _, left, right in sorted(found)]


def _spelling(
    pieces: SentencepieceFile, settings: Mapping[str, Any]
) -> tuple[normalizers.Normalizer, pre_tokenizers.PreTokenizer | None]:
    """Return what spells spaces as pieces do. `legacy: false`: only a text's begin has one put before it."""
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.squeezes_spaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if pieces.adds_prefix and settings.get("legacy") is False:
        return normalizers.Sequence(steps), pre_tokenizers.Metaspace(_SPACE, prepend_scheme="first", split=False)
    if pieces.adds_prefix:
        steps.append(normalizers.Prepend(_SPACE))
    return normalizers.Sequence([*steps, normalizers.Replace(" ", _SPACE)]), None


def _added_tokens(folder: Path, settings: Mapping[str, Any]) -> dict[int, AddedToken]:
    """Return by id the tokens that the folder names, some of which may be pieces by another name."""
    known = {place: AddedToken(text, normalized=False) for text, place in (read_object(folder / "added_tokens.json") or
                                                                          {}).items()}  # fmt: skip
    stated = settings.get("added_tokens_decoder")
    for place, token in (stated if isinstance(stated, dict) else {}).items():
        flags = {flag: bool(token[flag]) for flag in _FLAGS if flag in token}
        known[int(place)] = AddedToken(token["content"], **({"normalized": False} | flags))
    return known


def _frame(vocabulary: Vocabulary, settings: Mapping[str, Any]) -> None:
    """Set what stands before and behind a text that is encoded with special tokens."""
    begin = settings.get("bos_token") if settings.get("add_bos_token", True) else None
    end = settings.get("eos_token") if settings.get("add_eos_token", False) else None
    frame_texts(vocabulary, begin, end)


def frame_texts(vocabulary: Vocabulary, begin: str | None, end: str | None) -> None:
    """Put these tokens before and behind texts. They stand under names of our own: the template's syntax would cut a
    token at a space or a colon.
    """
    named = {name: text for name, text in (("begin", begin), ("end", end)) if text is not None}
    if named:
        pieces = [name for name in ("begin", "$A", "end") if name in named or name == "$A"]
        specials = [
            {"id": name, "ids": [vocabulary.token_to_id(text)], "tokens": [text]} for name, text in named.items()
        ]
        vocabulary.post_processor = processors.TemplateProcessing(single=pieces, special_tokens=specials)
