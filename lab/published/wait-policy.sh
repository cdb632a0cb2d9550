#!/usr/bin/env bash
# How OpenMP's idle threads wait, in steps whose attention is the CPU's: unset, PASSIVE, ACTIVE, in turn, ROUNDS times (1).
# `cpu`: at a small size on the CPU device.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
shape=llama-3.2-1b context=98304 limit='memory_limit_gib: 8' host='memory_limit_gib: 40' device=cuda steps=48
if [ "${2:-}" = cpu ]; then
    shape=tiny context=4096 limit='kv_cache_gib: 0.1' host='memory_limit_gib: 1, resident_tokens: 512' device=cpu steps=12
fi
cat > "$OUT/wait.yaml" <<YAML
model: {random_weights: $shape}
gpu: {device: $device, $limit, graph_batch_sizes: [1]}
host: {$host, residency: fixed}
scheduler: {max_running: 1, max_context_tokens: $((context + 2048)), default_profile: sampled}
YAML
for ((round = 0; round < ${ROUNDS:-1}; round++)); do for policy in "" PASSIVE ACTIVE; do
    name=$OUT/wait-${policy:-unset}-$round
    ${policy:+env OMP_WAIT_POLICY=$policy} tandem bench long "$OUT/wait.yaml" --context "$context" --batch 1 --profiles sampled --turn 0 --steps $steps \
        --seconds 3 --json "$name.json" > "$name.txt" 2>&1
    echo "${policy:-unset}: $(grep -E '^ *batch 1:' "$name.txt" || tail -n 2 "$name.txt")"
done; done
