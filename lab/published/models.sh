#!/usr/bin/env bash
# Models of 2026 with random weights on one card, held to what a smaller one has: prompts, decode steps, the next turn
# and the most memory at each length. `models.sh FOLDER PART...` runs some parts alone; `plan` before them prints what
# is planned (for the machine profile MACHINE, if that is set), and nothing runs. CONTEXTS and CHUNK in place
# of a part's own, LONGEST: what 35b-a3b has room for; GRAPHS: sizes of prefill units that are captured; TRACES=--traces:
# kernels and launches of a prompt and of steps are counted, too.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
mode=run parts=("${@:2}")
[ "${parts[0]:-}" = plan ] && mode=plan parts=("${parts[@]:1}")
[ ${#parts[@]} = 0 ] && parts=(27b 27b-four 27b-host 27b-host-four 35b-a3b 35b-a3b-four 35b-a3b-host 35b-a3b-host-four gemma-4 gpt-oss-16g)

deployment() { # name model gpu host scheduler chunk-tokens
    cat > "$OUT/$1.yaml" <<YAML
model: {$2, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: cuda, kv: int8, $3${GRAPHS:+, prefill_graph_sizes: [$GRAPHS]}}
scheduler: {$5, prefill: {chunk_tokens: ${CHUNK:-$6}}}
YAML
    [ -z "$4" ] || cat >> "$OUT/$1.yaml" <<YAML
host: {rows: int8, $4}
YAML
    [[ "$5" != *indexed* ]] || echo "profiles: {indexed: {host: {method: indexed, rings: 1, budget_share: 0.02}}}" >> "$OUT/$1.yaml"
}
lengths() { # name contexts options
    echo "== $1"
    if [ $mode = plan ]; then
        tandem plan "$OUT/$1.yaml" ${MACHINE:+--machine "$MACHINE"} 2>&1
        return
    fi
    python -m lab.speed.lengths "$OUT/$1.yaml" --contexts "${CONTEXTS:-$2}" "${@:3}" ${TRACES:-} --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1 || failed=1
    grep -E '^(prompt|decode|next|traced)|prefill graphs|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
dense='random_weights: qwen3.5-27b, weights: int4' mixture='random_weights: qwen3.5-35b-a3b, weights: int4'
one='states_gib: 0.35, host_states_gib: 4, graph_batch_sizes: [1]' four='states_gib: 1, host_states_gib: 4, graph_batch_sizes: [1, 2, 4]'
down='resident_tokens: 4096, residency: fixed'
failed=0
for part in "${parts[@]}"; do
    case $part in
    # Rows on the card; 128K of the 27B do not fit into 23 GiB with their prompt's hidden states (106,160 tokens do)
    27b) deployment 27b "$dense" "memory_limit_gib: 25, $one" "" "max_running: 1, max_context_tokens: 133632" 512 &&
        lengths 27b 4096,131072 ;;
    27b-four) deployment 27b-four "$dense" "memory_limit_gib: 23, $four" "" "max_running: 4, max_context_tokens: 8192" 512 && lengths 27b-four 4096 --batch 1,4 ;;
    35b-a3b) deployment 35b-a3b "$mixture" "memory_limit_gib: 23, $one" "" "max_running: 1, max_context_tokens: ${LONGEST:-196608}" 512 && lengths 35b-a3b 4096,131072,190000 ;;
    35b-a3b-four) deployment 35b-a3b-four "$mixture" "memory_limit_gib: 23, $four" "" "max_running: 4, max_context_tokens: 8192" 512 && lengths 35b-a3b-four 4096 --batch 1,4 ;;
    # Rows in host memory, in 8 bits, of 23 GiB: by an index of 4 bits on the card, and all read
    27b-host) deployment 27b-host "$dense" "memory_limit_gib: 23, $one" "memory_limit_gib: 12, $down" "max_running: 1, max_context_tokens: 133632, default_profile: indexed" 512 &&
        lengths 27b-host 131072 --profiles indexed ;;
    27b-host-four) deployment 27b-host-four "$dense" "memory_limit_gib: 23, $four" "memory_limit_gib: 30, $down" "max_running: 4, max_context_tokens: 133632, default_profile: offloaded" 512 &&
        lengths 27b-host-four 131072 --batch 1,4 --profiles offloaded --question 0 ;;
    35b-a3b-host) deployment 35b-a3b-host "$mixture" "memory_limit_gib: 23, $one" "memory_limit_gib: 12, $down" "max_running: 1, max_context_tokens: 262144, default_profile: offloaded" 512 &&
        lengths 35b-a3b-host 260000 --profiles offloaded ;;
    35b-a3b-host-four) deployment 35b-a3b-host-four "$mixture" "memory_limit_gib: 23, $four" "memory_limit_gib: 30, $down" "max_running: 4, max_context_tokens: 133632, default_profile: offloaded" 512 &&
        lengths 35b-a3b-host-four 131072 --batch 1,4 --profiles offloaded --question 0 ;;
    gemma-4) deployment gemma-4 "random_weights: gemma-4-26b-a4b, weights: int4" "memory_limit_gib: 22.5, graph_batch_sizes: [1, 2, 4]" \
        "" "max_running: 4, max_context_tokens: 135168" 2048 && lengths gemma-4 131072 --batch 1,2 ;;
    gpt-oss-16g) deployment gpt-oss-16g "random_weights: gpt-oss-20b" "memory_limit_gib: 15.2, experts_gib: auto, graph_batch_sizes: [1]" \
        "" "max_running: 1, max_context_tokens: 131072" 512 &&
        lengths gpt-oss-16g 4096,129000 ;;
    *) echo "models.sh: no part is called $part" >&2 && exit 2 ;;
    esac
done
exit $failed
