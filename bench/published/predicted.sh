#!/usr/bin/env bash
# AttentionPredictor: steps over predicted blocks, prefetched across tokens, beside fetching on demand and a layer ahead.
set -euo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
tandem eval selections --model deploy/models/reference --weights deploy/predictors/reference.safetensors --budget 2048 --out "$OUT/blocks.npz"
steps() { tandem bench kernel predicted-steps --steps 24 "$@"; }
steps --context 32768 --batches 1,4,8 --budgets 1024,2048,4096 --turnovers 0.05,0.2,0.5 --replay "$OUT/blocks.npz" | tee "$OUT/predicted-32k.txt"
steps --context 98304 --batches 1,4 --budgets 2048,4096 --turnovers 0.05,0.2 --trace "$OUT/predicted-trace.json" | tee "$OUT/predicted-96k.txt"
