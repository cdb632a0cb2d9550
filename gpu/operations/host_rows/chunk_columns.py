"""Define the table of chunks of host memory that the device attends to, int64 `[rows, COLUMNS, CHUNKS]`. No torch.

Of a chunk: addresses of its first key and value with strides in bytes, of float32 centre `[kv_heads, dim]`, key scale
`[kv_heads]` and value scale `[kv_heads, dim]` (bf16 rows have no scales), and its tokens, 0: it is not used.
"""

(
    KEYS, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, CENTRE, KEY_SCALE, VALUE_SCALE,
    TOKENS,
) = range(10)  # fmt: skip
COLUMNS = 10
CHUNKS = 32  # of a row's tokens: with the KV heads of a usual model, enough programs to fill the link
