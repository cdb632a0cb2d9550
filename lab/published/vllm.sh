#!/usr/bin/env bash
# vLLM, in process, and our server over HTTP at the same rows on one card, one after the other, and one table of both.
# `vllm.sh FOLDER [cpu] [ours|theirs|table]... [KIND]...`: steps (all three) and kinds of weights (bf16 alone) by name.
# Rows are written as they are done, and those that the folder has are not run again: a run that was cut goes on.
# ROWS: names with commas (`python -m lab.speed.vllm_rows -h`), `short` (all but 96K) or `all`. VLLM_PATH: where vLLM lies,
# if it is not installed: folders, with colons. PRODUCTS: of ours in few bits, as `model.products` (humming: the library).
# KV: 8-bit keys and values on both sides: ours as `gpu.kv` (fp8, int8), by which rows are named, vLLM's always in fp8.
# FAVOUR, CHUNK: of ours, as `scheduler.favour` and `scheduler.prefill.chunk_tokens`. Arrivals come at 0.7 of the slower side's best rate: in the second of two runs of
# ours; or at RATE a second: 11.85 is that of docs/PERFORMANCE.md. About 60 s of loads for a side and kind, 25 s for our
# start and 50 to 125 s for vLLM's.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
device=cuda shape=llama-3.1-8b moe=qwen3-30b-a3b memory='memory_limit_gib: 72' context=17408 small=() parts=() kinds=()
for word in "${@:2}"; do
    case $word in
    cpu) device=cpu shape=tiny moe=tiny-qwen3-moe memory='dtype: float32, kv_cache_gib: 0.2' context=4096 small=(--small) ;;
    ours | theirs | table) parts+=("$word") ;;
    bf16 | fp8 | int4 | moe) kinds+=("$word") ;;
    *) echo "vllm.sh: $word; wanted cpu, some of ours theirs table, and some of bf16 fp8 int4 moe" >&2 && exit 2 ;;
    esac
done
[ ${#parts[@]} = 0 ] && parts=(ours theirs ours table)
[ ${#kinds[@]} = 0 ] && kinds=(bf16)
rows=${ROWS:-short}
[[ $rows == *98304* || $rows == all ]] && context=100352

for kind in "${kinds[@]}"; do
    case $kind in
    bf16) model="random_weights: $shape" ;;
    moe) model="random_weights: $moe" ;;
    *) model="random_weights: $shape, weights: $kind, products: ${PRODUCTS:-auto}" ;;
    esac
    cat > "$OUT/tandem-$kind.yaml" <<YAML
model: {$model, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: $device, $memory${KV:+, kv: $KV}}
scheduler: {max_running: 64, max_context_tokens: $context${FAVOUR:+, favour: $FAVOUR}${CHUNK:+, prefill: {chunk_tokens: $CHUNK\}}}
YAML
    for part in "${parts[@]}"; do
        echo "== $kind: $part"
        case $part in
        ours) python -m lab peers-serve "$OUT/tandem-$kind.yaml" "$OUT/tandem-$kind.jsonl" --weights "$kind${KV:+, kv $KV}" --rows "$rows" "${small[@]}" \
            --rate-of "$OUT/vllm-$kind.jsonl" ${RATE:+--rate "$RATE"} ;;
        theirs) PYTHONPATH="${VLLM_PATH:+$VLLM_PATH:}${PYTHONPATH:-$PWD}" python -m lab.speed.vllm_rows "$kind" "$OUT/vllm-$kind.jsonl" --rows "$rows" \
            ${KV:+--kv fp8 --weights "$kind, kv $KV"} "${small[@]}" --rate-of "$OUT/tandem-$kind.jsonl" ${RATE:+--rate "$RATE"} ;;
        esac
    done
done
python -m lab peers-table "$OUT" --json "$OUT/peers.json"
