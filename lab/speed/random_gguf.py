"""Write a Llama of random weights as a GGUF file in Q4_K_M, for programs that read one. It has ids, but no words.

Blocks are random bytes except for their scales, which give a matrix of `n` columns numbers of about `n**-0.5` around
zero. As in llama.cpp's Q4_K_M, these tensors are Q6_K: the output and, in some layers, values and the MLP's last
product.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

_BLOCK = 256
_Q4_K_BYTES, _Q6_K_BYTES = 144, 210
_Q6_K_D = 208  # offset of a block's scale
# Of random bytes the deviation of numbers, as multiples of d; and what takes their mean off.
_Q4_K_STEPS, _Q4_K_LEAST, _Q6_K_STEPS = 250.0, 7.5, 1370.0


@dataclass(frozen=True, slots=True)
class LlamaSizes:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    vocab: int
    context: int


SIZES = {
    "llama-3.1-8b": LlamaSizes(4096, 32, 32, 8, 128, 14_336, 128_256, 131_072),
    "small": LlamaSizes(512, 4, 8, 4, 64, 1024, 2048, 8192),
}


def write_random_gguf(path: Path, sizes: LlamaSizes, seed: int = 0) -> None:
    """Write the file, tensor by tensor; about a minute for 8 billion weights."""
    kind = gguf.GGMLQuantizationType
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("random")
    writer.add_context_length(sizes.context)
    writer.add_embedding_length(sizes.hidden)
    writer.add_block_count(sizes.layers)
    writer.add_feed_forward_length(sizes.inner)
    writer.add_head_count(sizes.heads)
    writer.add_head_count_kv(sizes.kv_heads)
    writer.add_key_length(sizes.dim)
    writer.add_value_length(sizes.dim)
    writer.add_rope_dimension_count(sizes.dim)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(sizes.vocab)
    writer.add_tokenizer_model("no_vocab")
    tensors = list(_tensors(sizes))
    for name, rows, columns, is_finer in tensors:
        if not rows:
            writer.add_tensor_info(name, (columns,), np.dtype(np.float32), 4 * columns)
            continue
        num_bytes = columns // _BLOCK * (_Q6_K_BYTES if is_finer else _Q4_K_BYTES)
        of = kind.Q6_K if is_finer else kind.Q4_K
        writer.add_tensor_info(name, (rows, num_bytes), np.dtype(np.uint8), rows * num_bytes, of)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    random = np.random.default_rng(seed)
    for _, rows, columns, is_finer in tensors:
        data = _draw(random, rows, columns, is_finer) if rows else np.ones(columns, np.float32)
        writer.write_tensor_data(data)
    writer.close()


def _tensors(sizes: LlamaSizes) -> Iterator[tuple[str, int, int, bool]]:
    """Yield each tensor's name, rows (0 for a vector), columns, and whether it is Q6_K."""
    hidden, inner = sizes.hidden, sizes.inner
    yield "token_embd.weight", sizes.vocab, hidden, False
    for layer in range(sizes.layers):
        eighth = sizes.layers // 8
        finer = layer < eighth or layer >= 7 * eighth or (layer - eighth) % 3 == 2
        for name, rows, columns, is_finer in (
            ("attn_norm", 0, hidden, False),
            ("attn_q", sizes.heads * sizes.dim, hidden, False),
            ("attn_k", sizes.kv_heads * sizes.dim, hidden, False),
            ("attn_v", sizes.kv_heads * sizes.dim, hidden, finer),
            ("attn_output", hidden, sizes.heads * sizes.dim, False),
            ("ffn_norm", 0, hidden, False),
            ("ffn_gate", inner, hidden, False),
            ("ffn_up", inner, hidden, False),
            ("ffn_down", hidden, inner, finer),
        ):
            yield f"blk.{layer}.{name}.weight", rows, columns, is_finer
    yield "output_norm.weight", 0, hidden, False
    yield "output.weight", sizes.vocab, hidden, True


def _draw(random: np.random.Generator, rows: int, columns: int, is_finer: bool) -> NDArray[np.uint8]:
    """Return random blocks, uint8 `[rows, bytes]`."""
    blocks = rows * columns // _BLOCK
    num_bytes = _Q6_K_BYTES if is_finer else _Q4_K_BYTES
    words = random.integers(0, 2**64, -(-blocks * num_bytes // 8), dtype=np.uint64)
    data = words.view(np.uint8)[: blocks * num_bytes].reshape(blocks, num_bytes)
    if is_finer:
        data[:, _Q6_K_D : _Q6_K_D + 2] = np.array([columns**-0.5 / _Q6_K_STEPS], np.float16).view(np.uint8)
    else:
        d = columns**-0.5 / _Q4_K_STEPS
        data[:, :4] = np.array([d, _Q4_K_LEAST * d], np.float16).view(np.uint8)
    return data.reshape(rows, -1)
