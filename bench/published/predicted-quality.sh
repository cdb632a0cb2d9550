#!/usr/bin/env bash
# AttentionPredictor's quality on the reference model: attention recovered, tasks at 16x compression, errors beside reads,
# and how far estimated errors may be trusted. Parts are limited by time; what a part has finished stands in its JSON.
# In the same folder tasks go on where they were stopped. `cpu`: at small sizes, to see that all of it runs.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
predictor=deploy/predictors/reference.safetensors
model=(--model deploy/models/reference)
known=needle,word_needle,four_values,four_keys,many_needles,several_values,several_keys,facts_one_hop,facts_two_hops,variables,list,common_word,only_needles
lengths=16384,4096,8192 budgets=256,512,1024,2048 longest=16384 budget=1024 prompts=8 steps=4 rounds="8 16 32 64" forced=48
errors=(--lengths 4096,16384 --samples 2 --steps 8)
if [ "${2:-}" = cpu ]; then
    model+=(--device cpu)
    known=needle lengths=1024 budgets=256 longest=1024 budget=256 prompts=1 steps=2 rounds="1 2" forced=2
    errors=(--lengths 1024 --steps 2 --draws 1 --device cpu)
fi
half=$((budget / 2))
dense=dense_layers=0-1
rivals=("h2o:observe=64,heads=together,budget=$budget,$dense" "quest:sink=64,window=64,heads=together,budget=$budget,$dense"
    "snapkv:observe=64,heads=together,budget=$budget,$dense" "streaming:sink=$half,budget=$budget,$dense"
    "topk:sink=64,window=64,heads=together,budget=$budget,$dense")
sampled=("sampled:bits_per_table=10,num_tables=150,sink=64,window=64,$dense" "sampled:bits_per_table=9,num_tables=120,sink=64,window=64,$dense"
    "predicted:weights=$predictor,budget=$half,rest=sampled" "vattention:sink=64,window=64,heads=together,budget=$budget,$dense")
methods=(--method full --method "predicted:weights=$predictor,budget=$budget")
for one in "${rivals[@]}" "${sampled[@]}"; do methods+=(--method "$one"); done
begin=$SECONDS
left() { echo $((begin + ${SECONDS_LEFT:-280} - SECONDS)); }

# Of the host's kernel, so beside what the device does.
for task in needle text; do
    tandem eval errors "${model[0]}" "${model[1]}" "${errors[@]}" --tasks "${task/text/}" --json "$OUT/errors-$task.json" > "$OUT/errors-$task.txt" 2>&1
done &
tandem eval recovery "${model[@]}" --weights "$predictor" --lengths "$lengths" --budgets "$budgets" --tasks "$known,text" --samples "$prompts" \
    --steps "$steps" --seconds "${RECOVERY_SECONDS:-85}" --json "$OUT/recovery.json" > "$OUT/recovery.txt"
timeout "${FIDELITY_SECONDS:-70}" tandem eval fidelity "${model[@]}" "${methods[@]:2}" --lengths "$longest" --samples "$prompts" --forced "$forced" \
    --json "$OUT/fidelity.json" > "$OUT/fidelity.txt"
for samples in $rounds; do
    [ "$(left)" -gt 15 ] && tandem eval tasks "${model[@]}" "${methods[@]}" --tasks "$known" --lengths "$longest" --samples "$samples" \
        --seconds "$(left)" --resume "$OUT/tasks" --json "$OUT/tasks-$samples.json" > "$OUT/tasks-$samples.txt" && done_tasks=$samples
done
wait
files=()
for part in recovery fidelity; do [ -e "$OUT/$part.json" ] && files+=("--$part" "$OUT/$part.json"); done
for task in needle text; do [ -e "$OUT/errors-$task.json" ] && files+=(--errors "$OUT/errors-$task.json"); done
[ -n "${done_tasks:-}" ] && files+=(--tasks "$OUT/tasks-$done_tasks.json")
tandem eval predicted "${files[@]}" --machine "${MACHINE:-one NVIDIA H200}" --date "$(date +%F)" --out "$OUT/predicted.json"
