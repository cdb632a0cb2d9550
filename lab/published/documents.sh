#!/usr/bin/env bash
# A3 and its peers: first tokens by policy and by where chunks are, quality by ratio, a load of the kind `rag`.
# Each part has its seconds, and what is cut of it is the least wanted; one that fails leaves the others. The settings
# in capitals are for a try elsewhere. Its disk is $OUT's: 24 GiB, given back at the end.
set -euo pipefail
OUT=${1:-build/published}
SECONDS_LEFT=${SECONDS_LEFT:-380} BENCH_SECONDS=${BENCH_SECONDS:-160} LOAD_SECONDS=${LOAD_SECONDS:-14}
DEVICE=${DEVICE:-cuda} CONTEXT=${CONTEXT:-40000} PORT=${PORT:-8017}
MODEL=${MODEL:-random_weights: llama-3.1-8b, tokenizer: "$PWD/deploy/models/reference"}
MEMORY=${MEMORY:-memory_limit_gib: 76} CHUNK_GIB=${CHUNK_GIB:-24}
BENCH_LENGTHS=${BENCH_LENGTHS:-6144,16384,32768}
EVAL_LENGTHS=${EVAL_LENGTHS:-4096,16384} SAMPLES=${SAMPLES:-200} DOCUMENTS=${DOCUMENTS:-32} PER_PROMPT=${PER_PROMPT:-8}
began=$(date +%s) server='' failed=0
left() { echo $((SECONDS_LEFT - ($(date +%s) - began) - $1)); }
part() { # status 3: it ended, as it was asked to, before it was done
    local status=0
    "$@" || status=$?
    if [ $status != 0 ] && [ $status != 3 ]; then failed=$status && echo "failed with status $status: ${*:1:3}"; fi
}
is_ready() { python3 -c "import urllib.request as get; get.urlopen('http://127.0.0.1:$PORT/health')" 2> /dev/null; }
give_back() {
    if [ -n "$server" ]; then kill "$server" 2> /dev/null && wait "$server" || true; fi
    rm -rf "$OUT/chunks"
}
trap give_back EXIT
mkdir -p "$OUT/chunks"
cat > "$OUT/documents.yaml" <<YAML
model: {$MODEL}
gpu: {device: $DEVICE, $MEMORY}
documents: {folder: "$OUT/chunks", disk_limit_gib: $CHUNK_GIB, memory_limit_gib: $CHUNK_GIB}
profiles: {momo: {prefill: {method: momo, dense_until_tokens: 4096}}}
scheduler: {max_running: 4, max_context_tokens: $CONTEXT, prefill: {chunk_tokens: 4096}}
server: {port: $PORT}
YAML
# What the evaluation compiles, while the large engine loads and nothing is timed.
tandem eval fusion --model deploy/models/reference --lengths 1024 --samples 1 --maps 1 --policies "a3 pie" --ratios 0.15 \
    --device "$DEVICE" --seconds 25 > "$OUT/warm-up.txt" 2>&1 &
warming=$!
part tandem bench documents "$OUT/documents.yaml" --lengths "$BENCH_LENGTHS" --repeats 2 --profile momo \
    --places "memory,memory again,page cache,disk" \
    --policies "a3:select_layer=5 a3 pie random" --seconds "$BENCH_SECONDS" --json "$OUT/documents.json"
wait "$warming" || true
tandem serve "$OUT/documents.yaml" > "$OUT/server.txt" 2>&1 &
server=$!
part tandem eval fusion --model deploy/models/reference --lengths "$EVAL_LENGTHS" --samples "$SAMPLES" --maps 8 \
    --policies "a3:select_layer=5 a3 random:select_layer=5 random pie
a3:select_layer=3,ratio=0.15 a3:select_layer=7,ratio=0.15
a3:select_layer=5,ratio=0.15,seam_tokens=8" --ratios 0.05,0.15,0.3,0.5 \
    --device "$DEVICE" --seconds "$(left $((3 * LOAD_SECONDS + 20)))" --json "$OUT/fusion.json"
for _ in $(seq 240); do
    if is_ready || ! kill -0 "$server" 2> /dev/null; then break; fi
    sleep 0.5
done
for sent in ids text; do
    part tandem bench serve --url "http://127.0.0.1:$PORT" --kind rag --documents-as $sent --documents "$DOCUMENTS" \
        --documents-per-prompt "$PER_PROMPT" --tokenizer deploy/models/reference --output-tokens 16 --ignore-eos \
        --concurrency 2 --warmup 2 --duration "$LOAD_SECONDS" --json "$OUT/rag-$sent.json"
done
exit "$failed"
