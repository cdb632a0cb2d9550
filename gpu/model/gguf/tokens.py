"""A GGUF file's tokenizer: its vocabulary as `tokenizers` has it, and what `tokenizer_config.json` would say. No torch.

Byte-level merges (`gpt2`) with the cuts that llama.cpp knows by the names of pre-tokenizers, and sentencepiece's pieces
(`llama`). It refuses to know texts and requests. Invariant: a token's place in the list is its id; a vocabulary whose
lists disagree, or whose cuts are not known here, is refused by name.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Vocabulary

from gpu.model.gguf.file import GgufFile, read_gguf
from gpu.model.sentencepiece_file import Kind, SentencepieceFile
from gpu.model.sentencepiece_vocabulary import assemble_vocabulary
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
        "<|user|>", "<|observation|>",
    )
)  # fmt: skip
_OF_GLM = ("<|user|>", "<|observation|>")  # who speaks next: an end of GLM's turns and of no other's

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}"
_CUTS = {
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",),
    "gpt-4o": (rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_CASED_REST}",),
    "smollm": (r"\p{N}", _GPT2),
}
_ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe", "glm4": "llama-bpe", "chatglm-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "phi-2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2",
    "jina-es": "gpt-2",
}  # fmt: skip
# In these a word that is a token is not merged, and a text has its begin token where a file does not say.
_WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")


def read_gguf_vocabulary(path: Path) -> tuple[Vocabulary, dict[str, Any]]:
    """As `gpu.model.vocabulary.read_vocabulary`. Raises ModelError."""
    file = read_gguf(path)
    settings = _settings(file)
    tokens, kinds = _tokens(file), _kinds(file)
    model = file.metadata.get(_GGML + "model")
    if model == "llama":
        return assemble_vocabulary(_pieces(file, tokens, kinds), {}, str(file.path), settings), settings
    if model == "gpt2":
        return _byte_level(file, tokens, kinds, settings), settings
    raise ModelError(
        f"model: {file.path}: {_GGML}model is {model!r}; served: 'gpt2', 'llama'; set model.tokenizer to a folder that "
        "has a tokenizer.json"
    )


def gguf_end_token_ids(path: Path) -> tuple[int, ...]:
    """What the file names, and its control tokens that end turns by what they say; sorted. Raises ModelError."""
    file = read_gguf(path)
    if not file.metadata.get(_GGML + "tokens"):
        return ()
    tokens, kinds = _tokens(file), _kinds(file)
    ids = {_token_id(file, key, tokens) for key in _END_IDS} - {None}
    passed = () if file.metadata.get("general.architecture") == "glm4" else _OF_GLM
    ids |= {
        place for place, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind == Kind.CONTROL and token in _ENDS and token not in passed
    }  # fmt: skip
    return tuple(sorted(place for place in ids if place is not None))


def _tokens(file: GgufFile) -> list[str]:
    tokens = file.metadata.get(_GGML + "tokens")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(token, str) for token in tokens):
        raise ModelError(
            f"model: {file.path} has no {_GGML}tokens; set model.tokenizer to a folder that has a tokenizer"
        )
    return tokens


def _kinds(file: GgufFile) -> list[Kind]:
    """Of each token; normal, where a file does not say."""
    tokens = _tokens(file)
    values = _list(file, "token_type", len(tokens)) or [Kind.NORMAL] * len(tokens)
    known = {int(kind) for kind in Kind}
    for place, value in enumerate(values):
        if value not in known:
            raise ModelError(f"model: {file.path}: {_GGML}token_type of token {place} is {value!r}; known: 1 to 6")
    return [Kind(value) for value in values]


def _list(file: GgufFile, key: str, length: int) -> list[Any] | None:
    """One of the lists beside the tokens'."""
    values = file.metadata.get(_GGML + key)
    if values is not None and (not isinstance(values, list) or len(values) != length):
        got = f"{len(values):,} entries" if isinstance(values, list) else repr(values)
        raise ModelError(f"model: {file.path}: {_GGML}{key} is {got}; wanted one for each of {length:,} tokens")
    return values


def _token_id(file: GgufFile, key: str, tokens: Sequence[str]) -> int | None:
    value = file.metadata.get(_GGML + key)
    if value is not None and (not isinstance(value, int) or not 0 <= value < len(tokens)):
        raise ModelError(f"model: {file.path}: {_GGML}{key} is {value!r}; wanted one of {len(tokens):,} tokens")
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
            raise ModelError(f"model: {file.path}: {_GGML}{key} is {value!r}; wanted true or false")
        if value is not None:
            found[key] = value
    template = file.metadata.get("tokenizer.chat_template")
    named = {key.removeprefix(_NAMED): text for key, text in file.metadata.items() if key.startswith(_NAMED)}
    if named:
        texts = ({"default": template} if template else {}) | named
        template = [{"name": name, "template": text} for name, text in texts.items()]
    return found | ({"chat_template": template} if template else {})


def _pieces(file: GgufFile, tokens: list[str], kinds: list[Kind]) -> SentencepieceFile:
    scores = _list(file, "scores", len(tokens))
    if scores is None:
        raise ModelError(f"model: {file.path} has no {_GGML}scores; wanted one for each of {len(tokens):,} tokens")
    if file.metadata.get("general.architecture") == "gemma3":
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
    named = file.metadata.get(_GGML + "pre")
    cuts = _CUTS.get(_ALIASES.get(str(named), str(named)))
    if cuts is None:
        raise ModelError(
            f"model: {file.path}: {_GGML}pre is {named!r}; served: {', '.join(sorted((*_CUTS, *_ALIASES)))}; set "
            "model.tokenizer to a folder that has a tokenizer.json"
        )
    if len(set(tokens)) != len(tokens):
        raise ModelError(f"model: {file.path}: {_GGML}tokens has a token twice; wanted each once")
    vocab, merges = {token: place for place, token in enumerate(tokens)}, _merges(file)
    try:
        model = models.BPE(vocab=vocab, merges=merges, ignore_merges=named in _WHOLE_FIRST)
    except Exception as error:  # tokenizers raises bare Exception
        raise ModelError(f"model: {file.path}: {_GGML}merges do not fit its tokens: {error}") from None
    vocabulary = Vocabulary(model)
    if cuts == _CUTS["qwen2"]:
        vocabulary.normalizer = normalizers.NFC()
    parts: list[pre_tokenizers.PreTokenizer] = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in cuts]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary.pre_tokenizer = pre_tokenizers.Sequence([*parts, byte_level])
    vocabulary.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, normalized=False, special=kind != Kind.USER_DEFINED)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (Kind.CONTROL, Kind.USER_DEFINED, Kind.UNKNOWN)
    ]
    vocabulary.add_tokens(added)
    begins = settings.get("add_bos_token", named in _WHOLE_FIRST)
    frame = [settings[name] for name, is_there in (("bos_token", begins), ("eos_token", settings.get("add_eos_token")))
             if is_there and name in settings]  # fmt: skip
    if frame:
        ends = [*frame[:1], "$A", *frame[1:]] if begins and "bos_token" in settings else ["$A", *frame]
        ids = [(text, vocabulary.token_to_id(text)) for text in dict.fromkeys(frame)]
        vocabulary.post_processor = processors.TemplateProcessing(single=" ".join(ends), special_tokens=ids)
    return vocabulary


def _merges(file: GgufFile) -> list[tuple[str, str]]:
    merges = file.metadata.get(_GGML + "merges")
    if not isinstance(merges, list) or not merges:
        raise ModelError(f"model: {file.path} has no {_GGML}merges; wanted them beside {_GGML}model 'gpt2'")
    pairs = [tuple(merge.split(" ", 1)) if isinstance(merge, str) else () for merge in merges]
    broken = [place for place, pair in enumerate(pairs) if len(pair) != 2]
    if broken:
        raise ModelError(f"model: {file.path}: {_GGML}merges has {merges[broken[0]]!r}; wanted two tokens and a space")
    return pairs  # type: ignore[return-value]
