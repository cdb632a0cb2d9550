#!/usr/bin/env bash
# A3 and its peers: first tokens by policy and by where chunks are, and what a policy costs in quality.
set -euo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT/chunks"
cat > "$OUT/documents.yaml" <<YAML
model: {random_weights: llama-3.1-8b}
gpu: {device: cuda, memory_limit_gib: 76}
documents: {folder: "$OUT/chunks", disk_limit_gib: 24, memory_limit_gib: 24}
scheduler: {max_running: 4, max_context_tokens: 40000, prefill: {chunk_tokens: 4096}}
YAML
tandem bench documents "$OUT/documents.yaml" --lengths 6144,16384,32768 --repeats 3 --json "$OUT/documents.json"
tandem eval fusion --model deploy/models/reference --lengths 4096,16384 --samples 200 --seconds "${SECONDS_LEFT:-300}" \
    --policies "a3:select_layer=1 a3:select_layer=5 random:select_layer=5 cacheblend legolink random pie full_reuse" \
    --ratios 0.05,0.15,0.3,0.5 --json "$OUT/fusion.json"
