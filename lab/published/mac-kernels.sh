#!/usr/bin/env bash
# MAC-Attention: a layer's attention by hit rate, steps with contexts on the card, and steps over host memory.
set -euo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"

layer() { python -m lab kernel mac --outs bfloat16 --json "$OUT/mac-$1.json" "${@:2}"; }
layer lengths --lengths 32768,65536,131072 --batch 1,8,32 --rates 0,0.5,0.9,1 --gaps head
layer rates --lengths 131072 --batch 1,8,32 --rates 0.8,0.95 --gaps head
layer shared --lengths 131072 --batch 1,8,32 --rates 0.5,0.9 --gaps group
layer four --kv-heads 4 --lengths 131072 --batch 8,32 --rates 0,0.9 --gaps head
layer half --capacity 512 --lengths 131072,262144 --batch 32 --rates 1 --gaps head
layer longest --lengths 262144 --batch 1,8,32 --rates 0.9,1 --gaps head

python -m lab kernel mac-steps --context 32768 --batch 8 --rates 0.9,0.95,1 --steps 48
python -m lab kernel mac-steps --context 131072 --batch 3 --rates 0.9,0.95,1 --steps 48
python -m lab kernel mac-steps --context 98304 --batch 1 --rates 0.9 --steps 32 | tee "$OUT/mac-thresholds.txt"

# The thresholds that gave the rate on the card, in a deployment over host memory; the rate that it has is printed.
deployment() {
    python3 - "$OUT/mac-thresholds.txt" "$1" <<'PYTHON'
import json, sys
with open(sys.argv[1], encoding="utf-8") as file:
    (*_, line) = (line for line in file if line.startswith("{"))
reuse = {
    "method": "mac", "layer_tau": json.loads(line)["rows"][-1]["layer_tau"], "stops_matching": False,
    "max_prefix_share": 1, "min_context_tokens": 16384, "rings": 4 if float(sys.argv[2]) > 24 else 3,
}
print(json.dumps({
    "model": {"random_weights": "llama-3.1-8b"},
    "gpu": {"device": "cuda", "memory_limit_gib": float(sys.argv[2]), "graph_batch_sizes": [1, 2, 4]},
    "host": {"memory_limit_gib": 100, "residency": "fixed"},
    "profiles": {"sampled-mac": {"host": "sampled", "reuse": reuse}},
    "scheduler": {"max_running": 4, "max_context_tokens": 100000, "default_profile": "sampled"},
}))
PYTHON
}
for limit in 23 32; do
    deployment "$limit" > "$OUT/mac-$limit.yaml"
    batch=$([ "$limit" = 23 ] && echo 1 || echo 4)
    tandem bench long "$OUT/mac-$limit.yaml" --batch "$batch" --profiles sampled,sampled-mac --turn 0 --steps 48 --seconds 4 --json "$OUT/mac-$limit.json"
done
