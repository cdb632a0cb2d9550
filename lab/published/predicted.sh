#!/usr/bin/env bash
# AttentionPredictor: steps over predicted blocks, prefetched across tokens, beside fetching on demand and a layer ahead.
# Most valuable first; what does not fit into SECONDS_LEFT is left out. `cpu`: at small sizes, to see that all of it runs.
set -euo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
select=(--budget 4096 --length 16384)
steps=(--steps 24 --cells 32768:4096x4,98304:4096x4,32768:2048x1,98304:2048x1,32768:1024x8,32768:4096x8,32768:4096x1,32768:2048x4,98304:4096x1,32768:1024x1,98304:1024x4)
if [ "${2:-}" = cpu ]; then
    select=(--budget 512 --length 1024 --steps 4 --device cpu)
    steps=(--steps 8 --device cpu --shape tiny --cells 4096:512x2,4096:256x1)
fi
python -m lab selections --model deploy/models/reference --weights deploy/predictors/reference.safetensors "${select[@]}" --out "$OUT/blocks.npz"
python -m lab kernel predicted-steps "${steps[@]}" --turnovers 0.05,0.2,0.5 --replay "$OUT/blocks.npz" --seconds "${SECONDS_LEFT:-200}" \
    --trace "$OUT/predicted-trace.json" --json "$OUT/predicted-steps.json" > "$OUT/predicted-steps.txt"
sed -n '/^aims/,$p' "$OUT/predicted-steps.txt"
