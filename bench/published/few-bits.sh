#!/usr/bin/env bash
# Matrices of 4 and 8 bits and 8-bit keys and values, beside bf16: a layer, whole steps, and what 8-bit rows cost in answers.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
tandem bench kernel weights --kinds bfloat16,fp8,int8,int4,Q4_K --batch 1,4,16,64 --prefill 16384 --json "$OUT/matrices.json" # 70 s
tandem bench kernel kv --lengths 131072 --batch 1,8 --rates 0.9 --json "$OUT/kv.json"                         # 30 s
tandem bench engine --random-weights llama-3.1-8b --batch 1,4,16 --steps 32 --rounds 2 --json "$OUT/engine-bf16.json"
for kind in int4 fp8 Q4_K; do # 30 s each
    tandem bench engine --random-weights llama-3.1-8b --weights $kind --batch 1,4,16 --steps 32 --rounds 2 --json "$OUT/engine-$kind.json"
done
for kv in auto int8 fp8; do # side by side, 115 s together; pairs of equal prompts are compared
    cat > "$OUT/kv-$kv.yaml" <<YAML
model: {path: deploy/models/reference}
gpu: {device: cuda, kv: $kv, kv_cache_gib: 8, graph_batch_sizes: [1, 8, 64]}
scheduler: {max_running: 64, max_queue: 256}
YAML
    tandem eval tasks --model deploy/models/reference --config "$OUT/kv-$kv.yaml" --method profile:exact --lengths 2048 --samples 300 \
        --tasks needle,many_needles,word_needle,facts_one_hop,facts_two_hops,several_values,several_keys,variables,four_values \
        --device cuda --seconds "${SECONDS_LEFT:-100}" --resume "$OUT/kv-$kv" --json "$OUT/kv-$kv.json" > "$OUT/kv-$kv.txt" 2>&1 &
done
wait
tail -qn 3 "$OUT"/kv-*.txt
