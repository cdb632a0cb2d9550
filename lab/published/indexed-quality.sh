#!/usr/bin/env bash
# What `indexed` costs in quality on a real model, on one card: `indexed-quality.sh FOLDER MODEL TEXT CODE PART...`.
# MODEL: a folder or GGUF file; TEXT, CODE: files to put around needles and to go on with. Parts: `tasks` (prompts on
# which `exact` scores 20 or more), `weak` (the others, by KL), `kl` (next tokens behind TEXT and CODE, by budget, beside
# other methods) and `hard` (needles among needles at 16,000 tokens, by the project's own model); without any, all. `cpu`
# before them: few and short prompts on the CPU device, to see that all of it runs. SEED (0), LIMIT (seconds of each
# process, 200; of `kl` none, unless it is set), FEW (texts of a length of `kl` and `weak`, 24) and SETTINGS (of the
# method and of `host`, as `:budget_share=0.02,dense_layers=none`) from outside. All of a context is in host memory, and every step is audited. A part
# ends with a line a row, of which one of `kl` has 48: `KL own` is along what a profile drew itself (its prompt is
# computed exactly, so its `KL` along the text is 0), `KL` of the others along the text; `beyond` is the share of true
# errors above their bound. `tandem eval judge FOLDER/tasks-*.json FOLDER/weak-*.json` pools prompts.
set -uo pipefail
OUT=${1:-build/published} MODEL=${2:-deploy/models/reference} TEXT=${3:-} CODE=${4:-}
mkdir -p "$OUT" && rm -f "$OUT/failed"
parts=("${@:5}") device=cuda lengths=4000,8000 short=4000 long=8000 samples=400 few=${FEW:-24}
[ "${parts[0]:-}" = cpu ] && device=cpu lengths=1600 short=1400 long=1600 samples=1 few=1 parts=("${parts[@]:1}")
[ ${#parts[@]} = 0 ] && parts=(tasks weak kl hard)
seed=${SEED:-0} limit=${LIMIT:-200} method=profile:indexed${SETTINGS:-}
export NUMBA_NUM_THREADS=1 OMP_NUM_THREADS=1

deployment() { # name profiles model most-tokens
    cat > "$OUT/$1.yaml" <<YAML
model: {path: "${3:-$MODEL}"}
gpu: {device: $device, $([ $device = cuda ] && echo "memory_limit_gib: 7, graph_batch_sizes: [1, 2, 4, 8]" || echo "kv_cache_gib: 0.5")}
host: {memory_limit_gib: 3, threads: 1, resident_tokens: 0, residency: fixed}
profiles: {$2}
scheduler: {max_running: 8, max_context_tokens: ${4:-8192}}
YAML
}
index='indexed: {host: {method: indexed, least_tokens: 16, rings: 8, index_tokens: 131072, errors: {audit_steps: 1}}}'
job() { # name, options
    python -m lab eval "${@:2}" --model "$MODEL" --device $device --seed "$seed" --json "$OUT/$1.json" > "$OUT/$1.txt" 2>&1
    local status=$? # 3: cut after LIMIT
    [ $status = 0 ] || [ $status = 3 ] || echo "$1 ended with $status: $(tail -n 1 "$OUT/$1.txt")" | tee "$OUT/failed" >&2
}
beside() { wait; grep -hE "^error" "$OUT/$1"-*.txt | cut -c1-150; python -m lab quality-lines "$OUT/$1"-*.json; }
text=(${TEXT:+--text "$TEXT"})
for part in "${parts[@]}"; do
    case $part in
    # 11 processes. 240 s for some 1,500 prompts, half of the time before the first of them is the start
    tasks)
        deployment tasks "$index"
        for task in niah_multikey_1 niah_multiquery niah_multivalue niah_single_2; do
            for length in $short $long; do
                job "tasks-$task-$length" tasks --config "$OUT/tasks.yaml" --method profile:exact --method "$method" --form ruler --tasks $task \
                    --lengths $length --samples $samples --seconds "$limit" "${text[@]}" &
            done
        done
        for task in niah_single_3 fwe; do
            job "tasks-$task" tasks --config "$OUT/tasks.yaml" --method profile:exact --method "$method" --form ruler --tasks $task --lengths $short \
                --samples $samples --seconds "$limit" "${text[@]}" &
        done
        job tasks-niah_single_1 tasks --config "$OUT/tasks.yaml" --method profile:exact --method "$method" --form ruler --tasks niah_single_1 --lengths $long \
            --samples $samples --seconds "$limit" "${text[@]}" &
        beside tasks ;;
    # 4 processes, 120 s
    weak)
        deployment weak "$index"
        for task in cwe vt niah_multikey_2 niah_multikey_3; do
            job "weak-$task" tasks --config "$OUT/weak.yaml" --method profile:exact --method "$method" --form ruler --tasks $task --forced 16 \
                --lengths $lengths --samples $few --seconds "$limit" "${text[@]}" &
        done
        beside weak ;;
    # 3 processes, 200 s
    kl)
        deployment kl "$index"
        texts=("${text[@]}" ${CODE:+--text "$CODE"})
        job kl-indexed fidelity ${LIMIT:+--seconds $LIMIT} --config "$OUT/kl.yaml" --method profile:exact --method profile:indexed:budget_share=0.005 --method profile:indexed:budget_share=0.01 \
            --method profile:indexed:budget_share=0.02 --method profile:indexed:budget_share=0.05 --lengths $lengths --samples $few --forced 48 "${texts[@]}" &
        job kl-sampled fidelity ${LIMIT:+--seconds $LIMIT} --config "$OUT/kl.yaml" --method profile:sampled:bits_per_table=10,num_tables=150 \
            --method profile:sampled:bits_per_table=10,num_tables=300 --lengths $lengths --samples $few --forced 48 "${texts[@]}" &
        job kl-baselines fidelity ${LIMIT:+--seconds $LIMIT} --method quest:budget=0.05 --method vattention:budget=0.05 --method streaming:budget=0.05 --lengths $lengths --samples $few --forced 48 \
            "${texts[@]}" &
        beside kl ;;
    # The project's own model at 16,000 tokens, 4 processes, 120 s
    hard)
        [ $device = cpu ] || long=16000
        deployment hard "$index" "$PWD/deploy/models/reference" $((long + 384))
        for task in only_needles crossed_needles four_values four_keys; do
            MODEL=deploy/models/reference job "hard-$task" tasks --config "$OUT/hard.yaml" --method profile:exact --method "$method" --tasks $task --lengths $long \
                --samples $samples --seconds "$limit" &
        done
        beside hard ;;
    *) echo "indexed-quality.sh: part $part; wanted some of tasks weak kl hard, or cpu before them" >&2 && exit 2 ;;
    esac
done
[ ! -e "$OUT/failed" ]
