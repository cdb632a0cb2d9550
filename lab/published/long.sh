#!/usr/bin/env bash
# One decode step for all placements: 34B and 13B shapes over full attention's best, adaptive over fixed residence, and
# four contexts that stay on the card beside full attention. `long.sh FOLDER PART...` runs some parts alone; a part is one
# process that loads once.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
card=${CARD_GIB:-80} # that the larger deployments take; a card that is sold as 80 GB has less: 76
parts=("${@:2}")
[ ${#parts[@]} = 0 ] && parts=(34b-full 34b-bf16 34b-int8 13b-full 13b-bf16 8b-adaptive 8b-fixed 8b-fixed-four 8b-resident-four)

deployment() { # name shape card-GiB host-GiB rows residency max-context max-running
    cat > "$OUT/$1.yaml" <<YAML
model: {random_weights: $2}
gpu: {device: cuda, memory_limit_gib: $3, graph_batch_sizes: [1, 2, 4, 8]}
host: {memory_limit_gib: $4, rows: $5, residency: $6}
scheduler: {max_running: ${8:-8}, max_context_tokens: $7, default_profile: sampled}
YAML
}
long() { # name context batches profiles options
    echo "== $1: batches $3"
    tandem bench long "$OUT/$1.yaml" --context "$2" --batch "$3" --profiles "$4" --turn 0 --steps 24 --seconds 4 "${@:5}" --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1
    grep -E '^ *(lanes, )?batch [0-9]+[:,]|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
for part in "${parts[@]}"; do
    case $part in
    # 16,000 tokens, every row its own prompt, 80 GiB: full attention's best of every batch that fits, which is 4.  170 s
    34b-full) deployment 34b-full codellama-34b "$card" 64 bfloat16 adaptive 16384; long 34b-full 16000 1,2,4 exact ;;
    # Aim: tokens/s over 34b-full's best 1.15 in bf16 rows, 1.4 in int8.  200 s each
    34b-bf16) deployment 34b-bf16 codellama-34b "$card" 64 bfloat16 adaptive 16384; long 34b-bf16 16000 5,6,8 sampled ;;
    34b-int8) deployment 34b-int8 codellama-34b "$card" 64 int8 adaptive 16384; long 34b-int8 16000 5,6,8 sampled ;;
    # 48 GiB, where full attention has room for one.  170 s; aim of 13b-bf16: 2.0 times its tokens/s.  200 s
    13b-full) deployment 13b-full codellama-13b 48 100 bfloat16 adaptive 16384; long 13b-full 16000 1 exact ;;
    13b-bf16) deployment 13b-bf16 codellama-13b 48 100 bfloat16 adaptive 16384; long 13b-bf16 16000 1,2,4 sampled ;;
    # Aim: at batch 1 in 23 GiB at most 0.80 of fixed; and what it gains that a step is launched before the one before it
    # is collected.  115 s each
    8b-adaptive) deployment 8b-adaptive llama-3.1-8b 23 100 bfloat16 adaptive 100000 2; long 8b-adaptive 98304 1 sampled --one-in-flight ;;
    8b-fixed) deployment 8b-fixed llama-3.1-8b 23 100 bfloat16 fixed 100000 2; long 8b-fixed 98304 1 sampled --one-in-flight ;;
    # Aim: within 1.15 of the floor at the attend kernel's own rate, which is told last of a batch.  About 170 s
    8b-fixed-four) deployment 8b-fixed-four llama-3.1-8b "$card" 100 bfloat16 fixed 102400 4; long 8b-fixed-four 98304 4 sampled ;;
    # Aims: all four on the card, at most 20 ms, and no slower than full attention of prompts of their own by more than
    # 5 %.  About 170 s
    8b-resident-four) deployment 8b-resident-four llama-3.1-8b "$card" 100 bfloat16 adaptive 102400 4; long 8b-resident-four 98304 4 sampled,exact --own-prompts ;;
    *) echo "long.sh: part $part; wanted some of 34b-full 34b-bf16 34b-int8 13b-full 13b-bf16 8b-adaptive 8b-fixed 8b-fixed-four 8b-resident-four" >&2; exit 2 ;;
    esac
done
