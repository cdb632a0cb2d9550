"""GGUF files that somebody damaged or made up: each is refused in one line, at once, or read as the format says."""

import random
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest

import gpu.model.gguf.file as gguf_file
from gpu.model.architecture import read_architecture
from gpu.model.gguf.file import GgufFile, read_gguf
from gpu.model.spec import ModelError
from gpu.model.vocabulary import read_vocabulary
from gpu.weights.checkpoint import check_checkpoint
from tests.gpu.gguf_check import Found, WrongFileError, check_file
from tests.gpu.gguf_files import write
from tests.gpu.test_gguf import checkpoint

MOST_SECONDS = 3.0  # for a file of 300 KB, of which a good one takes 30 ms; a header's own length is all that counts
MOST_BYTES = 64 * 2**20
INTERESTING = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    31,
    2**15,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 64,
    2**64 - 1,
)
FLOATS = (float("nan"), float("inf"), -float("inf"), 1e308, -1.0, 0.0)


def vocabulary(size: int) -> dict[str, object]:
    """The metadata of a byte-level tokenizer of so many tokens, two merges among them."""
    byte_texts = [chr(byte) if 33 <= byte <= 126 or byte >= 174 else chr(256 + byte) for byte in range(256)]
    merges = ["t h", "th e"]
    tokens = [*byte_texts, *(merge.replace(" ", "") for merge in merges), "<end>"]
    tokens += [f"<extra {number}>" for number in range(size - len(tokens))]
    types = [1] * 258 + [3] * (size - 258)
    return {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges, "tokenizer.ggml.eos_token_id": 258,
        "tokenizer.ggml.add_bos_token": False, "tokenizer.chat_template": "{{ messages[0].content }}",
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small file with a tokenizer, lists of every kind and matrices of two kinds."""
    folder = tmp_path_factory.mktemp("hostile")
    plain = checkpoint("llama2").folder
    lists = {"x.numbers": [1, 2, 3], "x.floats": [0.5, 1.5], "x.texts": ["a", "b"], "x.flag": True, "x.real": 0.25}
    path = write(plain, folder / "model.gguf", lambda name: "Q8_0" if "ffn" in name else "F16",
                 lists | vocabulary(320), is_alone=True)  # fmt: skip
    return path.read_bytes()


def header_bytes(content: bytes) -> int:
    """Return where the first tensor's bytes begin."""
    first = next(iter(check_file(content).values()))[2]
    return content.index(first)


def flip_bits(content: bytearray, draw: random.Random, end: int) -> None:
    for _ in range(draw.randint(1, 3)):
        content[draw.randrange(end)] ^= 1 << draw.randrange(8)


def replace_number(content: bytearray, draw: random.Random, end: int) -> None:
    at, (code, size) = draw.randrange(end - 8), draw.choice([("B", 1), ("H", 2), ("I", 4), ("Q", 8)])
    content[at : at + size] = struct.pack(f"<{code}", draw.choice(INTERESTING) % 2 ** (8 * size))


def replace_float(content: bytearray, draw: random.Random, end: int) -> None:
    at = draw.randrange(end - 8)
    content[at : at + 4] = struct.pack("<f", draw.choice(FLOATS[:3]))


def cut_off(content: bytearray, draw: random.Random, end: int) -> None:
    del content[draw.choice([draw.randrange(64), draw.randrange(end), draw.randrange(len(content))]) :]


def insert(content: bytearray, draw: random.Random, end: int) -> None:
    at = draw.randrange(end)
    content[at:at] = draw.randbytes(draw.choice([1, 4, 8, 32]))


def delete(content: bytearray, draw: random.Random, end: int) -> None:
    at = draw.randrange(end)
    del content[at : at + draw.choice([1, 4, 8, 32])]


def repeat_part(content: bytearray, draw: random.Random, end: int) -> None:
    """As where an entry of the header is written twice."""
    at, size = draw.randrange(end), draw.choice([16, 40, 64])
    content[at:at] = content[at : at + size]


def change_tensor(content: bytearray, draw: random.Random, end: int) -> None:
    """A number of a tensor's entry: its rank, a size, its type or its offset."""
    names = [name.encode() for name in check_file(bytes(content))]
    name = draw.choice(names)
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    rank = struct.unpack_from("<I", content, at)[0]
    places = [(at, "I"), (at + 4 + 8 * rank, "I"), (at + 8 + 8 * rank, "Q")]
    places += [(at + 4 + 8 * number, "Q") for number in range(rank)]
    place, code = draw.choice(places)
    (was,) = struct.unpack_from(f"<{code}", content, place)
    size = 2 ** (32 if code == "I" else 64)
    value = draw.choice([*INTERESTING, was + 32, was - 32, was * 2, was // 2])
    struct.pack_into(f"<{code}", content, place, value % size)


def change_value(content: bytearray, draw: random.Random, end: int) -> None:
    """The number that stands behind a key of the architecture, or its type."""
    keys = [b"block_count", b"embedding_length", b"feed_forward_length", b"attention.head_count", b"context_length",
            b"attention.head_count_kv", b"rope.dimension_count", b"vocab_size", b"rope.freq_base", b"x.numbers",
            b"attention.layer_norm_rms_epsilon", b"tokenizer.ggml.tokens", b"tokenizer.ggml.eos_token_id"]  # fmt: skip
    keys = [key for key in keys if key in content]
    key = draw.choice(keys)
    at = content.index(key) + len(key)
    if draw.random() < 0.25:
        struct.pack_into("<I", content, at, draw.randrange(14))
    else:
        struct.pack_into("<I", content, at + 4, draw.choice(INTERESTING) % 2**32)


MUTATIONS: tuple[Callable[[bytearray, random.Random, int], None], ...] = (
    flip_bits, replace_number, replace_float, cut_off, insert, delete, repeat_part, change_tensor, change_value,
)  # fmt: skip


def read_everything(path: Path) -> GgufFile:
    """As far as a start goes before weights are copied: the header, the configuration, the tensors, the tokenizer."""
    file = read_gguf(path)
    check_checkpoint(path, read_architecture(path))
    read_vocabulary(path)
    return file


def same_as_the_format(file: GgufFile, found: Found, content: bytes) -> bool:
    """Whether every tensor is of the type, the shape and the bytes that the format says."""
    ours = {
        name: (one.kind, list(one.shape), content[one.offset : one.offset + one.num_bytes])
        for name, one in file.tensors.items()
    }
    return ours == found


def judge(path: Path, content: bytes) -> str:
    """Return 'refused' or 'read'. Fails where a file is read otherwise than the format says, or refused badly."""
    path.write_bytes(content)
    gguf_file._read.cache_clear()
    began, refused, file = time.monotonic(), "", None
    try:
        file = read_everything(path)
    except ModelError as error:
        refused = str(error)
    assert time.monotonic() - began < MOST_SECONDS
    if file is None:
        assert "\n" not in refused
        assert refused.startswith("model: ")
        assert len(refused) < 2000
        return "refused"
    assert same_as_the_format(file, check_file(content), content)
    return "read"


def run(whole_file: bytes, folder: Path, count: int, seed: int) -> dict[str, int]:
    end, outcomes = header_bytes(whole_file), {"refused": 0, "read": 0}
    for number in range(count):
        draw, content = random.Random(seed * 1_000_003 + number), bytearray(whole_file)
        MUTATIONS[number % len(MUTATIONS)](content, draw, end)
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        try:
            outcomes[judge(folder / "model.gguf", bytes(content))] += 1
        except Exception as error:
            raise AssertionError(f"mutation {number} ({MUTATIONS[number % len(MUTATIONS)].__name__})") from error
        assert tracemalloc.get_traced_memory()[1] - before < MOST_BYTES, f"mutation {number}"
    return outcomes


@pytest.mark.parametrize(
    ("count", "seed"),
    [(250, 1), pytest.param(10_000, 2, marks=[pytest.mark.long, pytest.mark.timeout(900)])],
)
def test_damaged_files_are_refused_in_one_line_or_read_as_the_format_says(
    whole_file: bytes, tmp_path: Path, count: int, seed: int
) -> None:
    assert judge(tmp_path / "good.gguf", whole_file) == "read"
    tracemalloc.start(1)
    try:
        outcomes = run(whole_file, tmp_path, count, seed)
    finally:
        tracemalloc.stop()
    assert outcomes["refused"] > count / 2
    assert outcomes["read"] > count / 50  # some change what nothing depends on


def test_the_check_sees_a_tensor_that_is_read_from_elsewhere(whole_file: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole_file)
    file, found = read_gguf(path), check_file(whole_file)
    assert same_as_the_format(file, found, whole_file)
    name = "blk.0.attn_q.weight"
    kind, shape, data = found[name]
    for other in (("Q8_0", shape, data), (kind, [*shape[::-1], 1], data), (kind, shape, data[1:] + data[:1])):
        assert not same_as_the_format(file, found | {name: other}, whole_file)


def test_the_check_knows_the_rules(whole_file: bytes) -> None:
    """Power of the oracle itself: it refuses what breaks each of its rules."""
    offset_of_second = change_offset(whole_file, 1, lambda was: 0)
    for broken in (
        whole_file[:-1], b"GGML" + whole_file[4:], whole_file[:4] + struct.pack(">I", 3) + whole_file[8:],
        whole_file[:8] + struct.pack("<Q", 2**60) + whole_file[16:], offset_of_second,
    ):  # fmt: skip
        with pytest.raises(WrongFileError):
            check_file(broken)


def change_offset(content: bytes, number: int, change: Callable[[int], int]) -> bytes:
    name = list(check_file(content))[number].encode()
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    place = at + 8 + 8 * struct.unpack_from("<I", content, at)[0]
    changed = bytearray(content)
    struct.pack_into("<Q", changed, place, change(struct.unpack_from("<Q", content, place)[0]) % 2**64)
    return bytes(changed)


@pytest.mark.parametrize("change", [
    lambda was: was + 32, lambda was: was + 7, lambda was: 0, lambda was: -64, lambda was: was - 32,
], ids=["gap", "not aligned", "overlap", "wraps", "into the one before"])  # fmt: skip
def test_tensors_lie_where_the_one_before_them_ends(
    change: Callable[[int], int], whole_file: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(change_offset(whole_file, 3, change))
    with pytest.raises(ModelError, match=r"tensor \S+ is at offset [\d,]+; wanted [\d,]+, where the"):
        read_gguf(path)


def test_a_layer_of_endless_number_is_no_layer(whole_file: bytes, tmp_path: Path) -> None:
    name, path = b"blk.0.attn_k.weight", tmp_path / "model.gguf"
    longer = b"blk." + b"9" * 240 + b".x"
    entry = struct.pack("<Q", len(name)) + name
    path.write_bytes(whole_file.replace(entry, struct.pack("<Q", len(longer)) + longer, 1))
    with pytest.raises(ModelError, match="model: "):
        read_everything(path)


def nested(depth: int) -> bytes:
    """An array of arrays of arrays, as deep as the file is long."""
    key = struct.pack("<Q", 1) + b"a" + struct.pack("<I", 9)
    return (
        b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + key + struct.pack("<IQ", 9, 1) * depth + struct.pack("<IQB", 0, 1, 7)
    )


HEADERS = {
    "nested arrays": (nested(100_000), "a is an array of arrays; wanted numbers or texts"),
    "other byte order": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "it is of the other byte order"),
    "no bytes": (b"", "it is empty; wanted a GGUF file"),
    "magic alone": (b"GGUF", "its version would be 4 from 4 on; fetch it again"),
    "keys without end": (b"GGUF" + struct.pack("<IQQ", 3, 0, 2**64 - 1), "it says that it has 18,446,744,073,709,551"),
    "tensors without end": (b"GGUF" + struct.pack("<IQQ", 3, 2**63, 0), "it says that it has 9,223,372,036,854,775"),
}  # fmt: skip


@pytest.mark.parametrize("name", HEADERS)
def test_made_up_headers_are_refused_at_once(name: str, tmp_path: Path) -> None:
    content, words = HEADERS[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    began = time.monotonic()
    with pytest.raises(ModelError) as refused:
        read_gguf(path)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert time.monotonic() - began < 1.0


ODD = {
    "a list for the architecture": ({"general.architecture": ["llama"]}, "general.architecture is ['llama']; served:"),
    "no width of keys": ({"llama.attention.key_length": 0}, "key_length is 0; wanted a whole number of 1 or more"),
    "half a head": ({"llama.attention.head_count": 1.5}, "head_count is 1.5; wanted a whole number of 1 or more"),
    "more heads than numbers": ({"llama.attention.head_count": 4096}, "head_count is 4096; wanted at most as many as"),
    "layers that are not there": ({"llama.block_count": 2**31}, "block_count is 2147483648; the file has tensors of 3"),
    "layers as a flag": ({"llama.block_count": True}, "block_count is True; the file has tensors of 3 layers"),
    "a list of heads": ({"llama.attention.head_count": [4, 4, 2]}, "head_count is [4, 4, 2]; wanted a number, or the"),
    "heads of other layers": ({"llama.attention.head_count": [4, 4]}, "head_count is [4, 4]; wanted a number, or the"),
    "a number for a text": ({"llama.rope.scaling.type": 7}, "llama.rope.scaling.type is 7; wanted a text"),
    "a long list": ({"general.alignment": [32] * 100_000}, "general.alignment is [32, 32"),
    "not finite": ({"llama.rope.freq_base": float("nan")}, "llama.rope.freq_base is nan; wanted a finite number"),
    "not finite in a list": ({"x.list": [1.0, float("inf")]}, "x.list is inf; wanted a finite number"),
    "tokens as a text": ({"tokenizer.ggml.tokens": "abc"}, "tokenizer.ggml.tokens is 'abc'; wanted a list of texts"),
    "a template that is none": ({"tokenizer.chat_template": 3}, "tokenizer.chat_template is 3; wanted a text"),
    "a named template": ({"tokenizer.chat_template.x": 5}, "tokenizer.chat_template.x is 5; wanted a text"),
    "a part of no number": ({"split.no": "0"}, "split.no is '0'; wanted a whole number"),
    "a list of parts": ({"split.count": [1, 1]}, "split.count is [1, 1]; wanted a whole number"),
    "a long list of vocabularies": ({"llama.vocab_size": [8] * 1000}, "llama.vocab_size is [8, 8"),
    "more than float32 holds": ({"llama.rope.freq_base": 1e300},
                                "rope.freq_base is 1e+300; wanted a number that float32 holds"),
    "heads without end": ({"llama.attention.head_count": 2**31 - 1, "llama.attention.head_count_kv": 1,
                           "llama.attention.key_length": 16}, "its metadata asks for"),
    "a width without end": ({"llama.feed_forward_length": 2**63 - 1},
                            "intermediate_size is 9223372036854775807; wanted 2,147,483,647 at most"),
    "merges of two lines": ({"tokenizer.ggml.merges": ["t a\nb"]}, "merges do not fit its tokens"),
    "cuts that are none": ({"tokenizer.ggml.pre": ["gpt-2"]}, "tokenizer.ggml.pre is ['gpt-2']; wanted a text"),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_values_of_the_wrong_kind_are_refused_by_their_key(name: str, tmp_path: Path) -> None:
    changes, words = ODD[name]
    plain = checkpoint("llama2").folder
    path = write(plain, tmp_path / "model.gguf", lambda _: "F16", vocabulary(320) | changes, is_alone=True)
    with pytest.raises(ModelError) as refused:
        read_everything(path)
    assert words in str(refused.value), str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("count", [5, 2**31, 2**32 - 1])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_that_are_not_there_are_refused_at_once(family: str, count: int, tmp_path: Path) -> None:
    plain = checkpoint(family).folder
    prefix = {"mixtral": "llama", "qwen3_moe": "qwen3moe"}[family]
    changes = {f"{prefix}.expert_count": count, f"{prefix}.expert_used_count": 2}
    path = write(plain, tmp_path / "model.gguf", lambda _: "F16", changes, is_alone=True)
    began = time.monotonic()
    with pytest.raises(ModelError, match=rf"expert_count is {count}; wanted \d+, of which the file has tensors"):
        read_architecture(path)
    assert time.monotonic() - began < MOST_SECONDS


def test_half_a_pair_of_numbers_is_not_rotated(tmp_path: Path) -> None:
    plain = checkpoint("glm4").folder
    path = write(plain, tmp_path / "model.gguf", lambda _: "F16", {"glm4.rope.dimension_count": 1}, is_alone=True)
    with pytest.raises(ModelError, match=r"partial_rotary_factor is .*; wanted an even number"):
        read_architecture(path)


@pytest.mark.parametrize("token", ["<s> x", "a:0", "$x", "$A"])
@pytest.mark.parametrize("key", ["bos", "eos"])
def test_a_begin_or_end_token_may_be_any_text(key: str, token: str, tmp_path: Path) -> None:
    plain, words = checkpoint("llama2").folder, vocabulary(320)
    words["tokenizer.ggml.tokens"][300] = token
    words |= {f"tokenizer.ggml.add_{key}_token": True, f"tokenizer.ggml.{key}_token_id": 300}
    path = write(plain, tmp_path / "model.gguf", lambda _: "F16", words, is_alone=True)
    ids = read_vocabulary(path)[0].encode("the").ids
    assert ids[0 if key == "bos" else -1] == 300
    assert len(ids) == 2


def test_equal_numbers_for_each_layer_are_one_number(tmp_path: Path) -> None:
    plain = checkpoint("llama2").folder
    one = read_architecture(write(plain, tmp_path / "one.gguf", lambda _: "F16", is_alone=True))
    names = {"attention.head_count": one.num_heads, "attention.head_count_kv": one.num_kv_heads}
    lists = {f"llama.{name}": [number] * one.num_layers for name, number in names.items()}
    many = read_architecture(write(plain, tmp_path / "many.gguf", lambda _: "F16", lists, is_alone=True))
    assert (many.num_heads, many.num_kv_heads, many.layers) == (one.num_heads, one.num_kv_heads, one.layers)


def test_an_embedding_that_is_no_matrix_is_refused(whole_file: bytes, tmp_path: Path) -> None:
    path, content = tmp_path / "model.gguf", bytearray(whole_file)
    name = b"token_embd.weight"
    at = content.index(struct.pack("<Q", len(name)) + name) + 8 + len(name)
    columns, rows = struct.unpack_from("<QQ", content, at + 4)
    content[at : at + 20] = struct.pack("<IQ", 1, columns * rows)
    content += bytes(8)
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight is \[\d+\]; wanted rows and columns"):
        read_everything(path)
