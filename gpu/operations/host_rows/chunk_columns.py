"""Define the table of chunks in host memory that the device attends to, int64 `[rows, COLUMNS, CHUNKS]`. No torch.

The columns of a chunk are: the addresses of its first key and first value, with strides in bytes; the addresses of the
float32 centre `[kv_heads, dim]`, key scale `[kv_heads]` and value scale `[kv_heads, dim]` (bf16 rows have no scales);
and its number of tokens, 0 if it is not used.
"""

(
    KEYS, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, CENTRE, KEY_SCALE, VALUE_SCALE,
    TOKENS,
) = range(10)  # fmt: skip
COLUMNS = 10
CHUNKS = 32  # most chunks of a row: times a usual model's KV heads, enough programs to fill the link
