#!/usr/bin/env bash
# One decode step for all placements: 34B and 13B shapes over full attention's best, adaptive over fixed residence, and a
# long prefill beside long streams, its blocks of attention short and as they come. `long.sh FOLDER PART...` runs some parts alone; a part is one process that loads once.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
parts=("${@:2}")
[ ${#parts[@]} = 0 ] && parts=(beside beside-uncut 34b-full 34b-bf16 34b-int8 13b-full 13b-bf16 8b-adaptive 8b-fixed 8b-fixed-four)

deployment() { # name shape card-GiB host-GiB rows residency max-context
    cat > "$OUT/$1.yaml" <<YAML
model: {random_weights: $2}
gpu: {device: cuda, memory_limit_gib: $3, graph_batch_sizes: [1, 2, 4, 8]}
host: {memory_limit_gib: $4, rows: $5, residency: $6}
scheduler: {max_running: ${8:-8}, max_context_tokens: $7, default_profile: sampled${9:+, prefill: {block_us: $9\}}}
YAML
}
beside() { # name block_us
    deployment "$1" llama-3.1-8b 80 100 bfloat16 fixed 100000 16 "$2"
    tandem bench beside "$OUT/$1.yaml" --short 8 --long 4 --long-tokens 98304 --seconds 3 --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1
    grep -E '^alone|^together|^a prompt|^a hop|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
long() { # name context batches profiles
    echo "== $1: batches $3"
    tandem bench long "$OUT/$1.yaml" --context "$2" --batch "$3" --profiles "$4" --turn 0 --steps 24 --seconds 4 --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1
    grep -E '^ *batch [0-9]+:|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
for part in "${parts[@]}"; do
    case $part in
    # Aim: the prefill takes at most 1.5 of alone, token gaps within the target (100 ms).  150 s each
    beside) beside beside "" ;;
    beside-uncut) beside beside-uncut 0 ;;
    # 16,000 tokens, every row its own prompt, 80 GiB: full attention's best of every batch that fits, which is 4.  170 s
    34b-full) deployment 34b-full codellama-34b 80 64 bfloat16 adaptive 16384; long 34b-full 16000 1,2,4 exact ;;
    # Aim: tokens/s over 34b-full's best 1.15 in bf16 rows, 1.4 in int8.  200 s each
    34b-bf16) deployment 34b-bf16 codellama-34b 80 64 bfloat16 adaptive 16384; long 34b-bf16 16000 5,6,8 sampled ;;
    34b-int8) deployment 34b-int8 codellama-34b 80 64 int8 adaptive 16384; long 34b-int8 16000 5,6,8 sampled ;;
    # 48 GiB, where full attention has room for one.  170 s; aim of 13b-bf16: 2.0 times its tokens/s.  200 s
    13b-full) deployment 13b-full codellama-13b 48 100 bfloat16 adaptive 16384; long 13b-full 16000 1 exact ;;
    13b-bf16) deployment 13b-bf16 codellama-13b 48 100 bfloat16 adaptive 16384; long 13b-bf16 16000 1,2,4 sampled ;;
    # Aim: at batch 1 in 23 GiB at most 0.80 of fixed.  110 s each
    8b-adaptive) deployment 8b-adaptive llama-3.1-8b 23 100 bfloat16 adaptive 100000 2; long 8b-adaptive 98304 1 sampled ;;
    8b-fixed) deployment 8b-fixed llama-3.1-8b 23 100 bfloat16 fixed 100000 2; long 8b-fixed 98304 1 sampled ;;
    # Aim: within 1.15 of the floor at the attend kernel's own rate, which is told last of a batch.  About 150 s
    8b-fixed-four) deployment 8b-fixed-four llama-3.1-8b 80 100 bfloat16 fixed 100000 4; long 8b-fixed-four 98304 4 sampled ;;
    *) echo "long.sh: part $part; wanted some of beside beside-uncut 34b-full 34b-bf16 34b-int8 13b-full 13b-bf16 8b-adaptive 8b-fixed 8b-fixed-four" >&2; exit 2 ;;
    esac
done
