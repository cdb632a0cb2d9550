"""Where the rows of a context's run lie in host memory: addresses that a device reads by itself. No torch.

It refuses to know segments and leases: whoever hands out a table keeps what it names. Invariants: pieces stand in the
run's order and are disjoint; a piece's rows are stored relative to one centre, with one scale a KV head; addresses, but
for key scales', and strides are multiples of ALIGN_BYTES.
"""

# Rows of a table, int64 `[layers, COLUMNS, pieces]`: a piece's tokens `[begin, end)` of the run; addresses of its first
# key and value, bf16 or int8 `[kv_heads, tokens, dim]` with their strides in bytes; and of float32 centre `[kv_heads,
# dim]`, key scale `[kv_heads]` and value scale `[kv_heads, dim]`, 0: bf16 rows have no scales.
(
    RUN_BEGIN, RUN_END, KEYS, KEY_HEAD_BYTES, KEY_ROW_BYTES, VALUES, VALUE_HEAD_BYTES, VALUE_ROW_BYTES, CENTRE,
    KEY_SCALE, VALUE_SCALE,
) = range(11)  # fmt: skip
COLUMNS = 11
ALIGN_BYTES = 16  # of a load
