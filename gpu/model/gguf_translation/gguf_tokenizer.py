"""Read a GGUF file's tokenizer: its vocabulary as `tokenizers` has it, and what `tokenizer_config.json` would say.

Served are byte-level merges (`gpt2`), with the cuts that llama.cpp names, sentencepiece's pieces (`llama`), and merges
of characters (`gemma4`). A vocabulary whose lists disagree, or whose cuts are not known here, is refused by name.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Vocabulary

from gpu.model.gguf.file import GgufFile, read_gguf
from gpu.model.gguf.header import shown
from gpu.model.gguf_translation.config_translation import families_of
from gpu.model.gguf_translation.cuts import ALIASES, CUTS, WHOLE_FIRST
from gpu.model.sentencepiece_file import Kind, SentencepieceFile
from gpu.model.sentencepiece_vocabulary import assemble_vocabulary, frame_texts
from gpu.model.spec import ModelError

_GGML = "tokenizer.ggml."
_NAMED = "tokenizer.chat_template."
_IDS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id", "sep_token": "seperator_token_id", "mask_token": "mask_token_id"}  # fmt: skip
_END_IDS = ("eos_token_id", "eot_token_id", "eom_token_id")
# Control tokens that end a turn by what they say: most files name one end token, as llama.cpp knows the others so, too.
_ENDS = frozenset(
    (
        "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>", "<end_of_turn>",
    )
)  # fmt: skip


def read_gguf_vocabulary(path: Path) -> tuple[Vocabulary, dict[str, Any]]:
    """Read a vocabulary as `gpu.model.vocabulary.read_vocabulary`. Raises ModelError."""
    file = read_gguf(path)
    settings = _settings(file)
    tokens, kinds = _tokens(file), _kinds(file)
    model = _word(file, _GGML + "model")
    if model == "llama":
        return assemble_vocabulary(_pieces(file, tokens, kinds), {}, str(file.path), settings), settings
    if model == "gpt2":
        return _byte_level(file, tokens, kinds, settings), settings
    if model == "gemma4":
        return _of_characters(file, tokens, kinds, settings), settings
    raise ModelError(
        f"model: {file.path}: {_GGML}model is {shown(model)}; served: 'gpt2', 'llama', 'gemma4'; set "
        "model.tokenizer to a folder that has a tokenizer.json"
    )


def gguf_end_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end tokens that the file names, and control tokens that end turns, sorted. Raises ModelError."""
    file = read_gguf(path)
    if not file.metadata.get(_GGML + "tokens"):
        return ()
    tokens, kinds = _tokens(file), _kinds(file)
    ids = {_token_id(file, key, tokens) for key in _END_IDS} - {None}
    forms = [family.gguf for family in families_of(file) if family.gguf is not None]
    ends = _ENDS.union(*(form.end_tokens for form in forms))
    inner = frozenset().union(*(form.inner_tokens for form in forms))
    ids |= {
        place for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == Kind.CONTROL and token in ends
    }  # fmt: skip
    return tuple(sorted(place for place in ids if place is not None and tokens[place] not in inner))


def _word(file: GgufFile, key: str) -> str | None:
    """Return a text, or None where the file does not say. Raises ModelError for anything else."""
    value = file.metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise ModelError(f"model: {file.path}: {key} is {shown(value)}; wanted a text")
    return value


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get(_GGML + "tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(
            f"model: {file.path} has no {_GGML}tokens; set model.tokenizer to a folder that has a tokenizer"
        )
    return tokens


def _kinds(file: GgufFile) -> list[Kind]:
    """Return the kind of each token; normal, where a file does not say."""
    tokens = _tokens(file)
    values = _list(file, "token_type", len(tokens)) or [Kind.NORMAL] * len(tokens)
    known = {int(kind) for kind in Kind}
    for place, value in enumerate(values):
        if value not in known:
            raise ModelError(f"model: {file.path}: {_GGML}token_type of token {place} is {shown(value)}; known: 1 to 6")
    return [Kind(value) for value in values]


def _list(file: GgufFile, key: str, length: int) -> list[Any] | None:
    """Return one of the lists beside the tokens'. Raises ModelError for another length."""
    values = file.metadata.get(_GGML + key)
    if values is not None and (not isinstance(values, list) or len(values) != length):
        got = f"{len(values):,} entries" if isinstance(values, list) else shown(values)
        raise ModelError(f"model: {file.path}: {_GGML}{key} is {got}; wanted one for each of {length:,} tokens")
    return values


def _token_id(file: GgufFile, key: str, tokens: Sequence[str]) -> int | None:
    value = file.metadata.get(_GGML + key)
    if value is not None and (type(value) is not int or not 0 <= value < len(tokens)):
        raise ModelError(f"model: {file.path}: {_GGML}{key} is {shown(value)}; wanted one of {len(tokens):,} tokens")
    return value


def _settings(file: GgufFile) -> dict[str, Any]:
    tokens, found = _tokens(file), {}
    for name, key in _IDS.items():
        token_id = _token_id(file, key, tokens)
        if token_id is not None:
            found[name] = tokens[token_id]
    for key in ("add_bos_token", "add_eos_token"):
        value = file.metadata.get(_GGML + key)
        if value is not None and not isinstance(value, bool):
            raise ModelError(f"model: {file.path}: {_GGML}{key} is {shown(value)}; wanted true or false")
        if value is not None:
            found[key] = value
    template = _word(file, "tokenizer.chat_template")
    named = {key.removeprefix(_NAMED): _word(file, key) for key in file.metadata if key.startswith(_NAMED)}
    if named:
        texts = ({"default": template} if template else {}) | named
        template = [{"name": name, "template": text} for name, text in texts.items()]
    return found | ({"chat_template": template} if template else {})


def _pieces(file: GgufFile, tokens: list[str], kinds: list[Kind]) -> SentencepieceFile:
    scores = _list(file, "scores", len(tokens))
    if scores is None:
        raise ModelError(f"model: {file.path} has no {_GGML}scores; wanted one for each of {len(tokens):,} tokens")
    if any(family.gguf is not None and family.gguf.merges_by_id for family in families_of(file)):
        scores = [-float(place) for place in range(len(tokens))]  # its merges are in the order of their tokens
    tokens = [
        "▁" * len(token) if kind == Kind.USER_DEFINED and token and not token.strip(" ") else token
        for token, kind in zip(tokens, kinds, strict=True)
    ]  # spaces that a file spells as such
    flags = {key: file.metadata.get(_GGML + key) for key in ("add_space_prefix", "remove_extra_whitespaces")}
    return SentencepieceFile(
        texts=tokens, scores=scores, kinds=kinds, is_bpe=True, has_byte_fallback=Kind.BYTE in kinds,
        unk_id=_token_id(file, "unknown_token_id", tokens), bos_id=_token_id(file, "bos_token_id", tokens),
        eos_id=_token_id(file, "eos_token_id", tokens), charsmap=b"",
        adds_prefix=flags["add_space_prefix"] is not False, squeezes_spaces=flags["remove_extra_whitespaces"] is True,
    )  # fmt: skip


def _byte_level(file: GgufFile, tokens: list[str], kinds: list[Kind], settings: dict[str, Any]) -> Vocabulary:
    named = _word(file, _GGML + "pre")
    cuts = CUTS.get(ALIASES.get(str(named), str(named)))
    if cuts is None:
        raise ModelError(
            f"model: {file.path}: {_GGML}pre is {shown(named)}; served: {', '.join(sorted((*CUTS, *ALIASES)))}; set "
            "model.tokenizer to a folder that has a tokenizer.json"
        )
    vocabulary = Vocabulary(_merging(file, tokens, ignore_merges=named in WHOLE_FIRST))
    if cuts in (CUTS["qwen2"], CUTS["qwen35"]):
        vocabulary.normalizer = normalizers.NFC()
    parts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    vocabulary.decoder = decoders.ByteLevel()
    _add_tokens(vocabulary, tokens, kinds, lambda token: False)
    _frame(vocabulary, settings, named in WHOLE_FIRST)
    return vocabulary


def _of_characters(file: GgufFile, tokens: list[str], kinds: list[Kind], settings: dict[str, Any]) -> Vocabulary:
    """Return a vocabulary that merges characters, in which spaces are `▁` and those that it lacks their bytes.

    Files have marks of channels and calls as a user's tokens, so that llama.cpp writes them; they are the model's.
    """
    unknown = settings.get("unk_token")
    vocabulary = Vocabulary(_merging(file, tokens, fuse_unk=True, unk_token=unknown, byte_fallback=Kind.BYTE in kinds))
    vocabulary.normalizer = normalizers.Replace(" ", "▁")
    vocabulary.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    _add_tokens(vocabulary, tokens, kinds, lambda token: token.startswith("<|") or token.endswith("|>"))
    _frame(vocabulary, settings, begins=True)
    return vocabulary


def _merging(file: GgufFile, tokens: list[str], **how: Any) -> models.Model:
    """Return the model of merges. Raises ModelError for lists that do not fit each other."""
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"model: {file.path}: {_GGML}tokens has a token twice; wanted each once")
    vocab, merges = {token: place for place, token in enumerate(tokens)}, _merges(file)
    try:
        return models.BPE(vocab=vocab, merges=merges, **how)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"model: {file.path}: {_GGML}merges do not fit its tokens: {shown(str(error))}") from None


def _add_tokens(
    vocabulary: Vocabulary, tokens: list[str], kinds: list[Kind], is_special: Callable[[str], bool]
) -> None:
    """Add the tokens that are no pieces of text. is_special: of one that the file calls a user's."""
    vocabulary.add_tokens(
        [
            AddedToken(token, normalized=False, special=kind != Kind.USER_DEFINED or is_special(token))
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
        ]
    )


def _frame(vocabulary: Vocabulary, settings: dict[str, Any], begins: bool) -> None:
    """Put the file's begin and end tokens around texts. begins: where it does not say."""
    has_begin = settings.get("add_bos_token", begins)
    end = settings.get("eos_token") if settings.get("add_eos_token") else None
    frame_texts(vocabulary, settings.get("bos_token") if has_begin else None, end)


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = file.metadata.get(_GGML + "merges")
    if not isinstance(merges, list) or not merges:
        raise ModelError(f"model: {file.path} has no {_GGML}merges; wanted them beside {_GGML}model 'gpt2' or 'gemma4'")
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else () for merge in merges]
    broken = [place for place, pair in enumerate(pairs) if len(pair) != 2]
    if broken:
        raise ModelError(
            f"model: {file.path}: {_GGML}merges has {shown(merges[broken[0]])}; wanted two tokens and a space"
        )
    return pairs  # type: ignore[return-value]
