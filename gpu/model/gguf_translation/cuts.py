"""List how byte-level tokenizers cut a text into words before they merge bytes, by a GGUF file's names for them.

The names are llama.cpp's (`tokenizer.ggml.pre`), and each one's patterns are those of the tokenizer that it stands for.
"""

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+", rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*")
_CASED_REST = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_SHORT}|{_WORDS}|\p{{N}}|{_REST}"
_WITH_MARKS = _REST.replace(r"\p{L}", r"\p{L}\p{M}")
_QWEN35 = rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}|{_WITH_MARKS}"
_BY_NEWLINE = r"[\r\n]"
_EAST_ASIAN = "[一-龥ࠀ-一가-퟿]+"
# Letters that have a case. The tokenizer of DeepSeek's first models lists those of Unicode 11, without Georgian's.
_CASED_LETTERS = r"\p{Lu}\p{Ll}\p{Lt}"
_ASCII_MARKS = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~]"
# Each list of patterns cuts one after the other, as llama.cpp does by the name in `tokenizer.ggml.pre`.
CUTS = {
    "default": (
        r"[\p{P}\$\+<=>\^~\|]+",
        r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
        r"\p{N}+",
        r"[0-9][0-9][0-9]",
    ),
    "deepseek-llm": (
        _BY_NEWLINE,
        rf"\s?[{_CASED_LETTERS}]+",
        r"\s?[!-/:-~！-／：-～‘-‟　-。]+",
        r"\s+$",
        _EAST_ASIAN,
        r"\p{N}+",
    ),
    "deepseek-coder": (_BY_NEWLINE, r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}"),
    "deepseek-v3": (
        r"\p{N}{1,3}",
        "[一-龥぀-ゟ゠-ヿ]+",
        _ASCII_MARKS + r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ),
    "seed-coder": (rf"{_SHORT}|{_WORDS}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+",),
    "gpt-2": (_GPT2,),
    "llama-bpe": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "qwen35": (_QWEN35,),
    "tekken": (rf"{_CASED[0]}|{_CASED[1]}|\p{{N}}|{_CASED_REST}",),
    "gpt-4o": (rf"{_CASED[0]}{_SHORT}?|{_CASED[1]}{_SHORT}?|\p{{N}}{{1,3}}|{_CASED_REST}",),
    "smollm": (r"\p{N}", _GPT2),
}
ALIASES = {
    "llama3": "llama-bpe", "llama-v3": "llama-bpe", "falcon3": "llama-bpe", "pixtral": "llama-bpe",
    "dbrx": "llama-bpe", "smaug-bpe": "llama-bpe", "glm4": "llama-bpe", "chatglm-bpe": "llama-bpe",
    "deepseek-r1-qwen": "qwen2", "megrez": "qwen2", "phi-2": "gpt-2", "mpt": "gpt-2", "olmo": "gpt-2",
    "llama4": "gpt-4o", "jina-es": "gpt-2", "refact": "smollm", "starcoder": "smollm",
}  # fmt: skip
# In these a word that is a token is not merged, and a text has its begin token where a file does not say.
WHOLE_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken")
