"""Folders with sentencepiece's `tokenizer.model`: ids and texts are sentencepiece's own, which trains the models."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, SentencePieceTrainer
from tokenizers import Tokenizer as Vocabulary
from tokenizers import models

from bench.load.tokenised_text import load_tokenizer
from gpu.model.end_tokens import end_token_ids
from server.deployment import ConfigError
from server.text.model_tokenizer import Tokenizer
from server.text.text_stream import TextDecoder

LLAMA = {"model_type": "bpe", "normalization_rule_name": "identity"}
GEMMA = LLAMA | {"add_dummy_prefix": False, "pad_id": 0, "eos_id": 1, "bos_id": 2, "unk_id": 3,
                 "user_defined_symbols": ["<start_of_turn>", "\n\n"]}  # fmt: skip
TRAININGS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "unigram": {"model_type": "unigram", "remove_extra_whitespaces": True},
}
ANY_TEXT = st.text(
    st.sampled_from(" \n\tabcdehilnorst.,1234é☃▲和") | st.characters(exclude_categories=["Cs"]), max_size=40
)


@cache
def model(name: str) -> tuple[bytes, SentencePieceProcessor]:
    """Return a model trained on this project's own pages."""
    pages = Path(__file__).parents[2].joinpath("docs").glob("*.md")
    lines = [line for page in sorted(pages) for line in page.read_text().splitlines() if line][:1500]
    file = io.BytesIO()
    options = {"byte_fallback": True, "remove_extra_whitespaces": False, "split_digits": True, "vocab_size": 800,
               "allow_whitespace_only_pieces": True, "num_threads": 1, "minloglevel": 2}  # fmt: skip
    SentencePieceTrainer.train(sentence_iterator=iter(lines), model_writer=file, **(options | TRAININGS[name]))
    return file.getvalue(), SentencePieceProcessor(model_proto=file.getvalue())


def folder_of(name: str, folder: Path, **settings: Any) -> Tokenizer:
    (folder / "tokenizer.model").write_bytes(model(name)[0])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text("{}")
    return Tokenizer(folder, None)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    return {name: folder_of(name, tmp_path_factory.mktemp(name)) for name in TRAININGS}


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(max_examples=150, deadline=None)
@given(text=ANY_TEXT)
def test_ids_are_sentencepieces_and_spell_the_text_again(name: str, served: dict[str, Tokenizer], text: str) -> None:
    """Of any text, in bytes where no piece is known. A symbol that a model defines is none here but as a whole."""
    processor, tokenizer = model(name)[1], served[name]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    spelled = b"".join(map(tokenizer.token_bytes, ids))
    assert spelled.decode() == (" " if name == "llama" and text else "") + text


@pytest.mark.parametrize("text", ["Hello world", "  two   spaces ", "ﬁne ½ Å", "tokens of 128 pages, each"])
def test_a_unigram_model_normalises_and_squeezes_as_sentencepiece_does(text: str, served: dict[str, Tokenizer]) -> None:
    assert served["unigram"].encode(text, add_special_tokens=False) == model("unigram")[1].encode(text)


def test_a_streamed_text_is_whole_characters(served: dict[str, Tokenizer]) -> None:
    tokenizer = served["llama"]
    ids = tokenizer.encode("a ☃ of pages", add_special_tokens=False)
    assert {b"\xe2", b"\x98", b"\x83"} < {tokenizer.token_bytes(token_id) for token_id in ids}
    decoder = TextDecoder(tokenizer, skip_special_tokens=True)
    pieces = [decoder.step(token_id) for token_id in ids]
    assert "".join(pieces).lstrip() == "a ☃ of pages"
    assert all("\ufffd" not in piece for piece in pieces)


def test_begin_and_end_tokens_are_the_files_or_as_the_settings_say(tmp_path: Path) -> None:
    bare, own = folder_of("llama", tmp_path), model("llama")[1].encode("page")
    assert bare.encode("page", True) == [1, *own]
    assert (bare.special_tokens["bos_token"], bare.special_tokens["eos_token"]) == ("<s>", "</s>")
    assert bare.eos_ids == [2] == list(end_token_ids(tmp_path))
    assert bare.encode("</s>", False) == [2]
    framed = folder_of("llama", tmp_path, add_bos_token=False, add_eos_token=True, bos_token="")
    assert framed.encode("page", True) == [*own, 2]
    gemma = folder_of("gemma", tmp_path)
    assert gemma.encode("page", True) == [2, *model("gemma")[1].encode("page")]
    assert gemma.eos_ids == [1] == list(end_token_ids(tmp_path))


def test_tokens_that_the_folder_adds_have_the_ids_that_it_states(tmp_path: Path) -> None:
    size = model("llama")[1].get_piece_size()
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|end|>": size + 1, "<|user|>": size}))
    renamed = {"3": {"content": "<|pad|>", "special": True}, str(size + 1): {"content": "<|end|>", "special": True}}
    tokenizer = folder_of("llama", tmp_path, added_tokens_decoder=renamed, eos_token="<|end|>",
                          chat_template="{{ messages[0]['content'] }}")  # fmt: skip
    assert tokenizer.encode("<|user|><|end|><|pad|>", False) == [size, size + 1, 3]
    assert tokenizer.eos_ids == [size + 1] == list(end_token_ids(tmp_path))
    assert {size + 1, 3, 0, 1, 2} <= tokenizer.special_ids
    assert size not in tokenizer.special_ids
    assert tokenizer.settings["chat_template"]
    assert tokenizer.encode_plain("<|end|>") != [size + 1]
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|user|>": size + 4}))
    with pytest.raises(ConfigError, match=rf"'<\|user\|>' is {size + 4}, and would be {size} behind {size} pieces"):
        folder_of("llama", tmp_path)


def test_only_a_texts_own_begin_has_a_space_where_the_folder_is_not_legacy(tmp_path: Path) -> None:
    page = model("llama")[1].encode("page")
    assert folder_of("llama", tmp_path).encode("page</s>page", False) == [*page, 2, *page]
    modern = folder_of("llama", tmp_path, legacy=False).encode("page</s>page", False)
    assert modern[: len(page) + 1] == [*page, 2]
    assert modern[len(page) + 1 :] != page
    assert folder_of("llama", tmp_path, legacy=False).encode_plain("page") == modern[len(page) + 1 :]


def test_the_load_client_reads_the_same_folder(tmp_path: Path) -> None:
    tokenizer = folder_of("llama", tmp_path)
    assert load_tokenizer(tmp_path).encode("of pages").ids == tokenizer.encode("of pages", True)


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x08\x96\x01junk")
    with pytest.raises(ConfigError, match=r"tokenizer: model: .*tokenizer\.model"):
        Tokenizer(tmp_path, None)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is missing, and so is tokenizer\.model"):
        Tokenizer(tmp_path / "none", None)


@pytest.mark.parametrize(("token", "spelt"), [("<0x0A>", b"\n"), ("<0xZZ>", b"<0xZZ>"), ("<0x\x01D>", b"<0x\x01D>")])
def test_only_byte_tokens_stand_for_a_byte(token: str, spelt: bytes, tmp_path: Path) -> None:
    vocabulary = Vocabulary(models.BPE(vocab={token: 0, "a": 1}, merges=[]))
    vocabulary.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer(tmp_path, None).token_bytes(0) == spelt
