"""A GGUF file in place of a model's folder: its texts, template, ends, plan and answers, and what is refused."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2
from tokenizers import Regex, pre_tokenizers
from transformers import GemmaTokenizer
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from evals.tokenizer import load_tokenizer as load_for_evals
from gpu.config import ModelConfig
from gpu.model.architecture import ModelError, read_architecture
from gpu.model.end_tokens import end_token_ids
from gpu.model.gguf_translation.cuts import ALIASES, CUTS
from gpu.weights.weights_digest import digest_weights
from server.commands.servable import require_servable
from server.deployment import ConfigError, Deployment, load_deployment
from server.planning.deployment_plan import resolve_plan
from server.prompting.chat_template import load_template
from server.service.sampling_defaults import load_sampling_defaults
from server.service.vector_settings import load_vectors
from server.text.model_tokenizer import Tokenizer
from tests.gpu.family_checkpoints import checkpoint
from tests.gpu.gguf_files import vocabulary, write
from tests.server.live_server import LAPTOP, REFERENCE
from tests.server.test_end_to_end import CHAT, serve
from tests.server.test_sentencepiece import ANY_TEXT, model
from transfer.machine import load_machine


def kinds(name: str) -> str:
    """Rows of 384 columns are in blocks of 32."""
    return "Q6_K" if "ffn_down" in name and name.startswith("blk.1.") else "Q8_0"


def q8(name: str) -> str:
    return "Q8_0"


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    more = {"general.sampling.temp": 0.0, "general.sampling.top_k": 20}
    return write(REFERENCE, folder / "reference-Q8_0.gguf", q8, vocabulary(REFERENCE) | more, is_alone=True)


@pytest.fixture(scope="module")
def pair(reference: Path) -> tuple[Tokenizer, ...]:
    """Return the file, and the folder that it was made of."""
    return Tokenizer(reference, reference), Tokenizer(REFERENCE, REFERENCE)


def small(folder: Path, **changes: Any) -> Path:
    """Write a file of a tiny Llama with a vocabulary of its size."""
    known = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.tokens": ["<|a|>", "b", "<|end|>", "bc", "c", *(f"{i}x" for i in range(315))],
        "tokenizer.ggml.token_type": [3, 1, 3, *[1] * 317], "tokenizer.ggml.merges": ["b c"],
    }  # fmt: skip
    named = {key.replace("__", "."): value for key, value in changes.items()}
    return write(checkpoint("llama2").folder, folder / "small.gguf", lambda name: "F32", known | named, is_alone=True)


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT | st.sampled_from(["<|user|>\nHi<|end|>", "a  b\n\n c 1234", "naïve 和 ☃", "can't WON'T"]))
def test_texts_have_the_ids_of_the_folder_that_the_file_was_made_of(pair: tuple[Tokenizer, ...], text: str) -> None:
    ours, theirs = pair
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == theirs.encode(text, add_special_tokens=True)
    assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids, skip_special_tokens=False)
    assert [ours.token_bytes(token_id) for token_id in ids] == [theirs.token_bytes(token_id) for token_id in ids]


def test_control_tokens_ends_template_and_sampling_are_those_of_the_folder(
    reference: Path, pair: tuple[Tokenizer, ...]
) -> None:
    ours, theirs = pair
    assert ours.special_ids == theirs.special_ids
    assert ours.special_tokens == theirs.special_tokens
    assert ours.eos_ids == theirs.eos_ids == [1, 5]
    assert read_architecture(reference).eos_token_ids == (1, 5)
    template = load_template(ModelConfig(path=reference), ours)
    assert template.source == load_template(ModelConfig(path=REFERENCE), theirs).source
    defaults = load_sampling_defaults(Deployment(model=ModelConfig(path=reference)))
    assert (defaults.temperature, defaults.top_k, defaults.top_p) == (0.0, 20, 1.0)
    vectors = load_vectors(ModelConfig(path=reference), ours)
    assert vectors.embedding.kind == "last"
    evals = load_for_evals(reference)
    assert evals("a house").input_ids == theirs.encode("a house", add_special_tokens=True)
    assert evals.eos_token == "<|end|>"


@pytest.mark.parametrize("name", ["llama", "gemma"])
@settings(max_examples=60, deadline=None)
@given(text=ANY_TEXT)
def test_sentencepieces_pieces_give_its_ids(name: str, piece_files: dict[str, Path], text: str) -> None:
    tokenizer, processor = Tokenizer(piece_files[name], None), model(name)[1]
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == processor.encode(text)
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


@cache
def gemmas() -> tuple[Any, dict[str, Any]]:
    """Transformers' tokenizer of a Gemma with merges of characters, and the metadata of a file of it."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "<|channel>", "<channel|>", "mine"]
    words += [f"<0x{byte:02X}>" for byte in range(256)] + [*"▁\nabcdehlorwtn,.é"]
    merges = [("\n", "\n"), ("\n\n", "\n"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello"),
              ("▁", "▁"),
              ("o", "r"), ("w", "or"), ("▁", "wor"), ("l", "d"), ("▁▁", "▁▁"), ("é", "t")]  # fmt: skip
    words += [left + right for left, right in merges]
    words += [f"<unused{i}>" for i in range(320 - len(words))]
    theirs = GemmaTokenizer(vocab={word: place for place, word in enumerate(words)}, merges=merges)
    theirs.add_special_tokens({"additional_special_tokens": ["<|channel>", "<channel|>"]})
    theirs.add_tokens(["mine"])
    types = [3, 3, 3, 3, 3, 4, 4, 4, *[6] * 256, *[1] * (320 - 264)]
    return theirs, {
        "tokenizer__ggml__model": "gemma4", "tokenizer__ggml__pre": None, "tokenizer__ggml__tokens": words,
        "tokenizer__ggml__token_type": types, "tokenizer__ggml__merges": [" ".join(pair) for pair in merges],
        "tokenizer__ggml__bos_token_id": 2, "tokenizer__ggml__eos_token_id": 1, "tokenizer__ggml__unknown_token_id": 3,
        "tokenizer__ggml__padding_token_id": 0, "tokenizer__ggml__add_bos_token": True,
    }  # fmt: skip


@pytest.fixture(scope="module")
def of_characters(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(small(tmp_path_factory.mktemp("characters"), **gemmas()[1]), None)


@settings(max_examples=100, deadline=None)
@given(text=ANY_TEXT | st.text(" \nhelowrdé,", max_size=30)
       | st.sampled_from(["<|channel>hello world<channel|>\n\n\n", "mine  hello", "   a<bos>é ☃"]))  # fmt: skip
def test_merges_of_characters_give_the_ids_of_transformers(of_characters: Tokenizer, text: str) -> None:
    theirs, ours = gemmas()[0], of_characters
    ids = ours.encode(text, add_special_tokens=True)
    assert ids == [2, *theirs.encode(text, add_special_tokens=False)]
    assert b"".join(map(ours.token_bytes, ids[1:])) == text.encode()
    assert {5, 6} < set(ours.special_ids), "marks of channels, which files call a user's"
    for skips in (False, True):
        assert ours.decode(ids, skip_special_tokens=skips) == theirs.decode(ids, skip_special_tokens=skips)


def test_begin_and_end_tokens_stand_where_the_file_says(piece_files: dict[str, Path], tmp_path: Path) -> None:
    tokenizer, processor = Tokenizer(piece_files["llama"], None), model("llama")[1]
    assert tokenizer.encode("a b", add_special_tokens=True) == [processor.bos_id(), *processor.encode("a b")]
    assert tokenizer.eos_ids == [processor.eos_id()]
    path = small(tmp_path, tokenizer__ggml__bos_token_id=0, tokenizer__ggml__add_eos_token=True)
    assert Tokenizer(path, None).encode("bc", add_special_tokens=True) == [0, 3, 2]
    (tmp_path / "other").mkdir()
    path = small(tmp_path / "other", tokenizer__ggml__bos_token_id=0, tokenizer__ggml__add_bos_token=False)
    assert Tokenizer(path, None).encode("bc", add_special_tokens=True) == [3]


@pytest.fixture(scope="module")
def piece_files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Write files as a converter does: user-defined runs of spaces as such."""
    return {name: _write_pieces(tmp_path_factory.mktemp(name), *model(name)) for name in ("llama", "gemma")}


def _write_pieces(folder: Path, proto: bytes, processor: SentencePieceProcessor) -> Path:
    parsed = sentencepiece_model_pb2.ModelProto()
    parsed.ParseFromString(proto)
    pieces = parsed.pieces
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": [piece.piece for piece in pieces],
        "tokenizer.ggml.scores": [float(piece.score) for piece in pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in pieces],
        "tokenizer.ggml.bos_token_id": processor.bos_id(), "tokenizer.ggml.eos_token_id": processor.eos_id(),
        "tokenizer.ggml.unknown_token_id": processor.unk_id(),
        "tokenizer.ggml.add_space_prefix": parsed.normalizer_spec.add_dummy_prefix,
    }  # fmt: skip
    plain = checkpoint("llama2", vocab_size=len(pieces), num_hidden_layers=1).folder
    return write(plain, folder / "pieces.gguf", lambda name: "F16", metadata, is_alone=True)


def test_cuts_are_those_that_others_know_by_the_same_names() -> None:
    shared = [name for name in (*CUTS, *ALIASES) if name in GGUF_PRE_TOKENIZER_SPLITS]
    assert {"llama-bpe", "qwen2", "qwen35", "tekken", "gpt-4o", "smaug-bpe"} <= set(shared)
    for name in shared:
        assert CUTS[ALIASES.get(name, name)] == (GGUF_PRE_TOKENIZER_SPLITS[name],), name


@pytest.mark.parametrize("name", ["qwen2", "qwen35"])
def test_accents_of_their_own_are_joined_to_letters_where_the_tokenizers_of_that_name_do(
    name: str, tmp_path: Path
) -> None:
    tokens = ["<|a|>", "b", "<|end|>", "bc", "c", "Ã", "©", *(f"{i}x" for i in range(313))]
    tokenizer = Tokenizer(small(tmp_path, tokenizer__ggml__pre=name, tokenizer__ggml__tokens=tokens), None)
    assert tokenizer.encode("e\u0301", False) == tokenizer.encode("é", False) == [5, 6]


@pytest.mark.parametrize(("name", "words"), [
    ("default", ["He", "'", "s", " ", "123", "456", " kg", " ", "+=", " x", " "]),
    ("deepseek-llm", ["He", "\'", "s", " ", "123456", " kg", " +=", " x", " "]),
    ("deepseek-coder", ["He", "\'", "s", " ", "1", "2", "3", "4", "5", "6", " kg", " +=", " x", " "]),
    ("deepseek-v3", ["He", "\'s", " ", "123", "456", " kg", " +=", " x", " "]),
    ("seed-coder", ["He", "\'s", " ", "1", "2", "3", "4", "5", "6", " kg", " +=", " x", " "]),
])  # fmt: skip
def test_words_are_cut_as_the_tokenizers_of_that_name_cut_them(name: str, words: list[str]) -> None:
    """Contractions, digits, marks and spaces at the end, in which these differ."""
    cuts = [pre_tokenizers.Split(Regex(cut), "isolated") for cut in CUTS[name]]
    pieces = pre_tokenizers.Sequence(cuts).pre_tokenize_str("He's 123456 kg += x ")
    assert [piece for piece, _ in pieces] == words


def test_runs_of_spaces_and_named_templates_are_read(tmp_path: Path) -> None:
    template = {"tokenizer__chat_template": "default", "tokenizer__chat_template__tool_use": "tools"}
    tokenizer = Tokenizer(small(tmp_path, **template), None)
    assert tokenizer.settings["chat_template"] == [
        {"name": "default", "template": "default"}, {"name": "tool_use", "template": "tools"}
    ]  # fmt: skip
    found = load_template(ModelConfig(path=tmp_path / "small.gguf"), tokenizer)
    assert (found.source, found.for_tools.source) == ("default", "tools")


def test_ends_are_all_that_a_file_names_and_control_tokens_that_end_turns(tmp_path: Path) -> None:
    tokens = ["<|a|>", "b", "<|end|>", "bc", "c", "<|eot_id|>", "<|user|>", "<|im_end|>"]
    tokens += [f"{i}x" for i in range(312)]
    types = [3, 1, 3, 1, 1, 3, 3, 1, *[1] * 312]  # <|im_end|> is a word like others here
    path = small(
        tmp_path, tokenizer__ggml__tokens=tokens, tokenizer__ggml__token_type=types, tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__eom_token_id=3,
    )  # fmt: skip
    assert end_token_ids(path) == (0, 2, 3, 5)


def test_a_message_of_gpt_oss_ends_no_answer(tmp_path: Path) -> None:
    tokens = ["<|return|>", "b", "<|end|>", "bc", "c", "<|call|>", *(f"{i}x" for i in range(314))]
    path = small(
        tmp_path, general__architecture="gpt-oss", tokenizer__ggml__tokens=tokens, tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__eot_token_id=2, tokenizer__ggml__token_type=[3, 1, 3, 1, 1, 3, *[1] * 314],
    )  # fmt: skip
    assert end_token_ids(path) == (0, 5)


def test_a_message_of_a_muse_glimmer_ends_no_answer_and_its_turn_does(tmp_path: Path) -> None:
    tokens = ["<|end_of_text|>", "b", "<|eot|>", "bc", "c", "<|eom|>", *(f"{i}x" for i in range(314))]
    path = small(
        tmp_path, general__architecture="muse-glimmer", tokenizer__ggml__tokens=tokens, tokenizer__ggml__eos_token_id=0,
        tokenizer__ggml__eom_token_id=5, tokenizer__ggml__token_type=[3, 1, 3, 1, 1, 3, *[1] * 314],
    )  # fmt: skip
    assert end_token_ids(path) == (0, 2)


def test_a_plan_says_what_is_repacked_and_the_file_alone_is_a_deployment(tmp_path: Path) -> None:
    path = write(REFERENCE, tmp_path / "reference.gguf", kinds, vocabulary(REFERENCE), is_alone=True)
    deployment = load_deployment(path)
    assert deployment.model.path == path
    plan = resolve_plan(deployment, load_machine(LAPTOP))
    require_servable(plan.deployment)
    assert plan.deployment.model.name == "reference"
    words = "47 matrices int8 in groups of 32, 1 matrices int8 in groups of 16, output matrix int8 in groups of 32"
    assert plan.notes[0] == f"reference.gguf: {words}, repacked to more bits or plain: 1 of Q6_K"


def test_the_file_is_named_by_its_content(reference: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.json"
    copy = tmp_path / "another-name.gguf"
    copy.write_bytes(reference.read_bytes())
    assert digest_weights(copy, kept) == digest_weights(reference, kept)
    with copy.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([copy.read_bytes()[-1] ^ 1]))
    assert digest_weights(copy, kept) != digest_weights(reference, kept)


def test_the_file_answers_as_the_folder_does(reference: Path, tmp_path: Path) -> None:
    """With the host tier, a grammar, and the magic number out of 2,000 tokens."""
    process, url = serve(tmp_path, {"model": {"path": str(reference)}})
    try:
        body = {"messages": CHAT, "max_tokens": 12}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120).json()
        assert "4815162" in answer["choices"][0]["message"]["content"]
        assert answer["model"] == "reference-Q8_0"
        schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"],
                  "additionalProperties": False}  # fmt: skip
        held = body | {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}}
        answer = httpx.post(f"{url}/v1/chat/completions", json=held | {"max_tokens": 30}, timeout=120).json()
        assert set(json.loads(answer["choices"][0]["message"]["content"])) == {"n"}
    finally:
        process.terminate()
        process.wait(timeout=60)


WRONG_TOKENS = {
    "fewer tokens": ({"tokenizer__ggml__tokens": ["a"] * 319}, "tokens says 319 tokens, and token_embd.weight has 320"),
    "types": ({"tokenizer__ggml__token_type": [1, 1]}, "token_type is 2 entries; wanted one for each of 320 tokens"),
    "a type": ({"tokenizer__ggml__token_type": [9] * 320}, "token_type of token 0 is 9; known: 1 to 6"),
    "end": ({"tokenizer__ggml__eos_token_id": 320}, "eos_token_id is 320; wanted one of 320 tokens"),
    "begin": ({"tokenizer__ggml__add_bos_token": "yes"}, "add_bos_token is 'yes'; wanted true or false"),
    "pre": ({"tokenizer__ggml__pre": "viking"}, "pre is 'viking'; served: chatglm-bpe, dbrx"),
    "no pre": ({"tokenizer__ggml__pre": None}, "pre is None; served: "),
    "model": (
        {"tokenizer__ggml__model": "bert"},
        "model is 'bert'; served: 'gpt2', 'llama', 'gemma4'; set model.tokenizer",
    ),
    "no merges": ({"tokenizer__ggml__merges": None}, "has no tokenizer.ggml.merges"),
    "merge": ({"tokenizer__ggml__merges": ["bc"]}, "merges has 'bc'; wanted two tokens and a space"),
    "strange merge": ({"tokenizer__ggml__merges": ["b zz"]}, "merges do not fit its tokens"),
    "twice": ({"tokenizer__ggml__tokens": ["b", *["c"] * 319]}, "tokens has a token twice"),
    "no scores": ({"tokenizer__ggml__model": "llama"}, "has no tokenizer.ggml.scores"),
    "no tokens": ({"tokenizer__ggml__tokens": None}, "has no tokenizer.ggml.tokens; set model.tokenizer"),
}


@pytest.mark.parametrize("name", WRONG_TOKENS)
def test_a_vocabulary_that_disagrees_is_told_in_one_line(name: str, tmp_path: Path) -> None:
    changes, words = WRONG_TOKENS[name]
    path = small(tmp_path, **changes)

    def plan() -> None:
        require_servable(resolve_plan(Deployment(model=ModelConfig(path=path)), load_machine(LAPTOP)).deployment)

    with pytest.raises((ModelError, ConfigError)) as refused:
        plan()
    assert words in str(refused.value)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_folder_that_holds_a_file_is_told_to_name_it(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((REFERENCE / "config.json").read_text())
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"has neither model\.safetensors .*; name the file, as .*some\.gguf"):
        require_servable(Deployment(model=ModelConfig(path=tmp_path)))
    with pytest.raises(ModelError, match=r"absent\.gguf cannot be read"):
        read_architecture(tmp_path / "absent.gguf")
    config = tmp_path / "deployment.yaml"
    config.write_text(yaml.safe_dump({"model": {"path": "some.gguf"}}))
    with pytest.raises(ModelError, match=r"some\.gguf: it has 4 bytes, and its version would be"):
        resolve_plan(load_deployment(config), load_machine(LAPTOP))
