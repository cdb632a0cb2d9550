#!/usr/bin/env bash
# Matrices of 4 and 8 bits and 8-bit keys and values, beside bf16: a layer, attention, whole steps, whole prompts, and what
# 8-bit rows and rounded weights cost in answers. `few-bits.sh FOLDER PART...` runs some parts alone; `cpu` before them: at
# small sizes on the CPU device, to see that all of it runs. `library` is asked for by name: it wants the extra `humming`.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
device=cuda shape=llama-3.1-8b batches=1,4,16 steps=32 rounds=2 prompt=16384 unit=8192 chunk=8192 kinds=bfloat16,fp8,int8,int4,Q4_K
layer=(--batch 1,4,16,64) attention=() lengths=131072 contexts=1,8 memory='memory_limit_gib: 80' graphs='1, 8, 64' tokens=2048 samples=400
tasks=needle,many_needles,word_needle,facts_one_hop,facts_two_hops,several_values,several_keys,variables,four_values
parts=("${@:2}")
if [ "${parts[0]:-}" = cpu ]; then
    device=cpu shape=tiny batches=1 steps=8 rounds=1 prompt=512 unit=256 chunk=256 kinds=bfloat16,int4
    layer=(--batch 1 --shape tiny --device cpu) attention=(--shape tiny) lengths=4096 contexts=1 memory='kv_cache_gib: 0.1' graphs=1 tokens=512 samples=1
    tasks=needle parts=("${parts[@]:1}")
fi
[ ${#parts[@]} = 0 ] && parts=(layer kv steps prompt rows weights)

answers() { # name weights rows
    cat > "$OUT/$1.yaml" <<YAML
model: {path: deploy/models/reference, weights: $2}
gpu: {device: $device, kv: $3, kv_cache_gib: $([ $device = cpu ] && echo 0.5 || echo 8), graph_batch_sizes: [$graphs]}
scheduler: {max_running: 64, max_queue: 256}
YAML
    tandem eval tasks --model deploy/models/reference --config "$OUT/$1.yaml" --method profile:exact --lengths $tokens --samples $samples \
        --tasks $tasks --device $device --seconds "${SECONDS_LEFT:-240}" --resume "$OUT/$1" --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1 &
}
prompt_of() { # weights products
    local name=prompt-$1$([ $2 = own ] || echo -$2)
    cat > "$OUT/$name.yaml" <<YAML
model: {random_weights: $shape, weights: $1, products: $2, tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: $device, $memory, dtype: bfloat16, graph_batch_sizes: [1]}
host: {memory_limit_gib: 1, resident_tokens: $((prompt + 256))}
scheduler: {max_running: 1, max_context_tokens: $((prompt + 256)), default_profile: exact, prefill: {chunk_tokens: $chunk}}
YAML
    tandem bench prefill "$OUT/$name.yaml" --lengths $prompt --profiles exact --turn 0 --no-peer --json "$OUT/$name.json"
}
for part in "${parts[@]}"; do
    echo "== $part"
    case $part in
    # Aims, of the library's bf16: FP8 1.45 and int4 1.7 times as fast at 1 row, int4 no slower at 16.  70 s
    layer) tandem bench op linear --kinds $kinds "${layer[@]}" --json "$OUT/matrices.json" && tandem bench op output --kinds $kinds "${layer[@]}" --json "$OUT/outputs.json" ;;
    # Aims, of bf16's time: 0.62, with MAC 0.75.  30 s
    kv) tandem bench op attention --tokens $lengths --batch $contexts "${attention[@]}" --device $device --json "$OUT/kv.json" ;;
    steps) # 30 s each
        for kind in "" int4 fp8 Q4_K; do
            tandem bench engine --random-weights $shape ${kind:+--weights $kind} --batch $batches --steps $steps --rounds $rounds \
                --device $device --dtype bfloat16 --json "$OUT/engine-${kind:-bf16}.json"
        done ;;
    prompt) # Aim: int4 within 1.15 of bf16's time.  50 s each
        for kind in bfloat16 int4 fp8; do prompt_of $kind own; done ;;
    # The same by humming-kernels beside our own, which it is to beat: a layer, whole steps (twice, with an empty folder of
    # kernels first: what a first start costs), a prompt.  300 s the first time, most of it compiling
    library)
        tandem bench op linear --kinds bfloat16,int4,humming-int4,fp8,humming-fp8 "${layer[@]}" \
            --json "$OUT/matrices-library.json"
        export XDG_CACHE_HOME; XDG_CACHE_HOME=$(realpath "$OUT")/library-cache
        for kind in int4 fp8 int4; do
            tandem bench engine --random-weights $shape --weights $kind --products humming --batch $batches,64 --steps $steps --rounds $rounds \
                --device $device --dtype bfloat16 --json "$OUT/engine-library-$kind.json"
        done
        for kind in int4 fp8; do prompt_of $kind humming; done
        unset XDG_CACHE_HOME ;;
    # Side by side; pairs of equal prompts are compared: 9 tasks of 400 are 3,600 of them. Aim: 0.3 points.  170 s
    rows) for kv in auto int8 fp8; do answers "kv-$kv" bfloat16 $kv; done && wait && tail -qn 3 "$OUT"/kv-*.txt ;;
    # Rounded at load. Aims: int4 1 point, FP8 0.3.  170 s
    weights) for kind in bfloat16 int4 fp8; do answers "weights-$kind" $kind auto; done && wait && tail -qn 3 "$OUT"/weights-*.txt ;;
    *) echo "few-bits.sh: part $part; wanted some of layer kv steps prompt rows weights library, or cpu before them" >&2 && exit 2 ;;
    esac
done
