#!/usr/bin/env bash
# What `indexed` is asked for on one card: steps of contexts in host memory and on the card, each beside what reads all of
# them, with the plan's expectations, and what making an index adds to a prompt. `indexed.sh FOLDER PART...` runs some
# parts alone; `cpu` before them: a tiny shape on the CPU device, to see that all of it runs; `plan` before them: what is
# planned (for the machine profile MACHINE, if that is set), and nothing runs. ROWS and RESIDENT, where set, are the only
# ones of parts with several. SHARE is the share of a context that is read (0.02), DENSE the layers that stay whole on the card
# (`[]`; `[0, 16]`, or `null` for the default of `host`). The quality of these settings is in docs/results/real-model.md.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
mode=run parts=("${@:2}")
case ${parts[0]:-} in cpu | plan) mode=${parts[0]} parts=("${parts[@]:1}") ;; esac
[ ${#parts[@]} = 0 ] && parts=(8b-96k 8b-96k-int8 8b-four 8b-four-resident 8b-int4-four 8b-256k 8b-256k-resident 32b-128k op prompt)
share="budget_share: ${SHARE:-0.02}" dense=${DENSE:-[]}
far='rope: {rope_type: yarn, factor: 2.0, original_max_position_embeddings: 131072}'
yarn='rope: {rope_type: yarn, factor: 4.0, original_max_position_embeddings: 32768}'

deployment() { # name model card-GiB host-GiB kv rows resident-tokens max-context max-running chunk indexed-settings
    local model="$2" card="$3" context="$8"
    if [ $mode = cpu ]; then
        cat > "$OUT/$1.yaml" <<YAML
model: {random_weights: tiny, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: cpu, kv_cache_gib: 0.1}
host: {memory_limit_gib: 1, rows: $6, resident_tokens: 128, residency: $([ "$7" = 8192 ] && echo adaptive || echo fixed), dense_layers: $dense}
profiles: {indexed: {host: {method: indexed, rings: $9, ${11}}}}
scheduler: {max_running: $9, max_context_tokens: 3072, default_profile: indexed, prefill: {chunk_tokens: 256}}
YAML
        return
    fi
    cat > "$OUT/$1.yaml" <<YAML
model: {$model, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: cuda, memory_limit_gib: $card, kv: $5, graph_batch_sizes: [1, 2, 4]}
host: {memory_limit_gib: $4, rows: $6, resident_tokens: $7, dense_layers: $dense}
profiles: {indexed: {host: {method: indexed, rings: $9, ${11}}}}
scheduler: {max_running: $9, max_context_tokens: $context, default_profile: indexed, prefill: {chunk_tokens: ${10}}}
YAML
}
planned() { # name
    tandem plan "$OUT/$1.yaml" ${MACHINE:+--machine "$MACHINE"} > "$OUT/$1-plan.txt" 2>&1
    grep -E "^error|\(taken\)|(rings|pages) of indexed|resident: auto: " "$OUT/$1-plan.txt"
    grep -qE "^error|Error" "$OUT/$1-plan.txt" && failed=1
}
long() { # name context batches profiles options
    echo "== $1: batches $3"
    planned "$1"
    [ $mode = plan ] && return
    local context=$2 steps=24
    [ $mode = cpu ] && context=2048 steps=8
    tandem bench long "$OUT/$1.yaml" --context "$context" --batch "$3" --profiles "$4" --turn 0 --steps $steps --seconds 4 "${@:5}" \
        --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1 || failed=1
    grep -E '^ *(lanes, )?batch [0-9]+[:,]|^error|Error' "$OUT/$1.txt" || tail -n 3 "$OUT/$1.txt"
}
failed=0
for part in "${parts[@]}"; do
    case $part in
    # Aims: 9.5 ms with rows in bf16, 8.5 in int8, 23 GiB.  120 s each
    8b-96k) deployment 8b-96k "random_weights: llama-3.1-8b" 23 40 auto bfloat16 2048 98816 1 2048 "$share" && long 8b-96k 98304 1 indexed,offloaded ;;
    8b-96k-int8) deployment 8b-96k-int8 "random_weights: llama-3.1-8b" 23 40 auto int8 2048 98816 1 2048 "$share" && long 8b-96k-int8 98304 1 indexed ;;
    # Aims, four of them in 32 GiB: 20 ms, in int8 15.  200 s each
    8b-four) for rows in ${ROWS:-bfloat16 int8}; do deployment 8b-four-$rows "random_weights: llama-3.1-8b" 32 80 auto $rows 2048 102400 4 2048 "$share" && long 8b-four-$rows 98304 1,4 indexed; done ;;
    # Aim, four that stay on the card of 80 GiB (they are in host memory, too): 13 ms (23.8 in full); `auto` is no slower than the better of both at any
    # batch, and the log's line `resident_index` says from where on.  200 s each
    8b-four-resident) for resident in ${RESIDENT:-indexed auto full}; do deployment 8b-four-$resident "random_weights: llama-3.1-8b" 80 80 auto bfloat16 8192 102400 4 2048 "$share, resident: $resident" && long 8b-four-$resident 98304 1,2,4 indexed --own-prompts; done ;;
    # Aim, weights in int4 and rows in int8, four of 96K in 23 GiB: 12 ms (23.7 read in full).  180 s
    8b-int4-four) deployment 8b-int4-four "random_weights: llama-3.1-8b, weights: int4" 23 60 int8 int8 2048 102400 4 2048 "$share" && long 8b-int4-four 98304 1,4 indexed ;;
    # Aims, 261,000 tokens: 10.5 ms; 9 with rows on the card, read by index.  200 s each
    8b-256k) deployment 8b-256k "random_weights: llama-3.1-8b, weights: int4, $far" 23 60 int8 int8 2048 262144 1 2048 "$share" && long 8b-256k 261000 1 indexed ;;
    8b-256k-resident) deployment 8b-256k-resident "random_weights: llama-3.1-8b, weights: int4, $far" 40 60 int8 int8 8192 262144 1 2048 "$share, resident: indexed" && long 8b-256k-resident 261000 1 indexed ;;
    # Aim, 130,560 tokens with keys of 3 bits: 30 ms (45 sampled), in 23 GiB. It takes 28.6: 5.8 of index beside 17.4 of
    # weights and 3.5 of a prompt under way. So this is the time alone, with room for units of 2,048 tokens.  250 s
    32b-128k) deployment 32b-128k "random_weights: qwen2.5-32b, weights: int4, $yarn" 34 48 int8 int8 1024 131072 1 2048 "key_bits: 3, $share" && long 32b-128k 130560 1 indexed ;;
    # A layer's parts over rows in bf16 and in int8, and a layer of resident pages beside full attention.  60 s each
    op)
        echo "== op"
        shape=(--shape llama-3.1-8b) tokens=98304 batches=1,4 device=cuda
        [ $mode = cpu ] && shape=(--shape tiny) tokens=2048 batches=1 device=cpu
        for rows in ${ROWS:-bfloat16 int8}; do
            [ $mode = plan ] || tandem bench op indexed --tokens $tokens --batch $batches "${shape[@]}" --device $device --rows $rows --share "${SHARE:-0.02}" \
                --json "$OUT/op-$rows.json" || failed=1
        done ;;
    # Aim: the prompt of 96K with an index at most 3 % over the same without. Beside it in the same card, twice, since a
    # card's clock drifts: one reads host memory by the CPU, which makes no index.  100 s
    prompt)
        echo "== prompt"
        deployment prompt "random_weights: llama-3.1-8b" 32 40 auto bfloat16 2048 98816 1 2048 "$share"
        planned prompt
        length=98304; [ $mode = cpu ] && length=2048
        for round in 1 2; do
            [ $mode = plan ] || tandem bench prefill "$OUT/prompt.yaml" --lengths $length --profiles offloaded,indexed --turn 0 --no-peer \
                --json "$OUT/prompt-$round.json" || failed=1
        done ;;
    *) echo "indexed.sh: part $part; wanted some of 8b-96k 8b-96k-int8 8b-four 8b-four-resident 8b-int4-four 8b-256k 8b-256k-resident 32b-128k op prompt, or cpu or plan before them" >&2 && exit 2 ;;
    esac
done
exit $failed
