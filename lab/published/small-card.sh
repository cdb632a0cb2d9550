#!/usr/bin/env bash
# What owners of a 24 GiB card run, inside 23 GiB, which torch is held to: the plan's expectations, and steps of long
# contexts on the card alone (8b-96k-card, of which nothing goes down) and over card and host.
# `small-card.sh FOLDER PART...` runs some parts alone. Aim: 32B at 128K 7 times the tokens/s of all of it read.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
parts=("${@:2}")
[ ${#parts[@]} = 0 ] && parts=(8b-96k-card 8b-96k 8b-256k 8b-four 32b-128k)

deployment() { # name model host-GiB resident-tokens max-context max-running chunk-tokens default-profile graphs
    cat > "$OUT/$1.yaml" <<YAML
model: {$2, weights: int4, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: cuda, memory_limit_gib: 23, kv: int8, graph_batch_sizes: [${9:-1}]}
host: {memory_limit_gib: $3, rows: int8, resident_tokens: $4}
scheduler: {max_running: $6, max_context_tokens: $5, default_profile: ${8:-sampled}, prefill: {chunk_tokens: $7}}
YAML
}
long() { # name context batches profiles
    echo "== $1"
    tandem plan "$OUT/$1.yaml" > "$OUT/$1-plan.txt" 2>&1
    grep -E "ms a token|sampling|error" "$OUT/$1-plan.txt" | head -n 8
    tandem bench long "$OUT/$1.yaml" --context "$2" --batch "$3" --turn 0 --steps 16 --seconds 5 --profiles "${4:-sampled,offloaded}" \
        --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1
    grep -E '^ *batch [0-9]+:|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
far='rope: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 131072}'
yarn='rope: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}'
for part in "${parts[@]}"; do
    case $part in
    8b-96k-card) deployment 8b-96k-card "random_weights: llama-3.1-8b" 1 100000 100000 1 2048 exact && long 8b-96k-card 98304 1 exact ;; # 100 s
    8b-96k) deployment 8b-96k "random_weights: llama-3.1-8b" 40 2048 100000 1 2048 && long 8b-96k 98304 1 ;;              # 120 s
    8b-256k) deployment 8b-256k "random_weights: llama-3.1-8b, $far" 60 2048 262144 1 2048 && long 8b-256k 261000 1 ;;    # 150 s
    8b-four) deployment 8b-four "random_weights: llama-3.1-8b" 60 2048 100000 4 2048 sampled "1, 2, 4" && long 8b-four 98304 1,2,4 ;;       # 150 s
    32b-128k) deployment 32b-128k "random_weights: qwen2.5-32b, $yarn" 48 1024 131072 2 512 && long 32b-128k 130560 1 ;;  # 300 s
    *) echo "small-card.sh: no part is called $part" >&2 && exit 2 ;;
    esac
done
