#!/usr/bin/env bash
# AttentionPredictor's quality on the reference model: attention recovered with the paper's settings, tasks at 16x
# compression, errors beside reads, and how far estimated errors may be trusted. `settings`, a run of its own: attention
# recovered with the settings that serve and by setting, and tasks by profiles that serve. Parts are limited by time; what a
# part has finished stands in its JSON, and all that is in the folder comes into the tables; what is in none of them there
# was no time for. In the same folder tasks go on where they were stopped. `cpu`: all of it at small sizes, to see that it runs.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
predictor=deploy/predictors/reference.safetensors
model=(--model deploy/models/reference)
known=needle,word_needle,four_values,four_keys,many_needles,several_values,several_keys,facts_one_hop,facts_two_hops,variables,list,common_word,only_needles
lengths=16384,4096,8192 budgets=256,512,1024,2048 longest=16384 budget=1024 prompts=8 steps=4 rounds="8 16 32 64" forced=48
errors=(--lengths 4096,16384 --samples 2 --steps 8)
varied=(--lengths 4096 --budgets 512 --steps 24 --group before --heads together)
paper=(--history 64 --sink 64 --calibrate 5 --rotate "" --every 1 --unread zero)
part=${2:-}
if [ "$part" = cpu ]; then
    model+=(--device cpu)
    known=needle lengths=1024 budgets=256 longest=1024 budget=256 prompts=1 steps=2 rounds="1 2" forced=2
    errors=(--lengths 1024 --steps 2 --draws 1 --device cpu)
    varied=(--lengths 1024 --budgets 256 --steps 2 --group before --heads together)
fi
half=$((budget / 2)) ends=128 # sink and window, which a profile does not count
dense=dense_layers=0-1
rivals=("h2o:observe=64,heads=together,budget=$budget,$dense" "quest:sink=64,window=64,heads=together,budget=$budget,$dense"
    "snapkv:observe=64,heads=together,budget=$budget,$dense" "streaming:sink=$half,budget=$budget,$dense"
    "topk:sink=64,window=64,heads=together,budget=$budget,$dense")
sampled=("sampled:bits_per_table=10,num_tables=150,sink=64,window=64,$dense" "sampled:bits_per_table=9,num_tables=120,sink=64,window=64,$dense"
    "predicted:weights=$predictor,budget=$half,rest=sampled" "vattention:sink=64,window=64,heads=together,budget=$budget,$dense")
methods=(--method full --method "predicted:weights=$predictor,budget=$budget")
for one in "${rivals[@]}" "${sampled[@]}"; do methods+=(--method "$one"); done
begin=$SECONDS
profiles="{method: predicted, weights: $PWD/$predictor, min_context_tokens: 0, budget_tokens: $((budget - ends))}"
both=${profiles/method: predicted/method: predicted+sampled}
cat > "$OUT/predicted-profiles.yaml" << EOF
model: {path: $PWD/deploy/models/reference}
host: {resident_tokens: 0, residency: fixed}
profiles:
  blocks: {host: $profiles}
  both: {host: $both}
EOF
left() { echo $((begin + ${SECONDS_LEFT:-280} - SECONDS)); }

if [ "$part" != settings ]; then
    # Of the host's kernel, so beside what the device does.
    for task in needle text; do
        python -m lab errors "${model[0]}" "${model[1]}" "${errors[@]}" --tasks "${task/text/}" --json "$OUT/errors-$task.json" > "$OUT/errors-$task.txt" 2>&1
    done &
    python -m lab recovery "${model[@]}" --weights "$predictor" --lengths "$lengths" --budgets "$budgets" --tasks "$known,text" --samples "$prompts" \
        --steps "$steps" "${paper[@]}" --seconds "${RECOVERY_SECONDS:-85}" --json "$OUT/recovery.json" > "$OUT/recovery.txt"
    timeout "${FIDELITY_SECONDS:-70}" python -m lab eval fidelity "${model[@]}" "${methods[@]:2}" --lengths "$longest" --samples "$prompts" --forced "$forced" \
        --json "$OUT/fidelity.json" > "$OUT/fidelity.txt"
    for samples in $rounds; do
        [ "$(left)" -gt 15 ] && python -m lab eval tasks "${model[@]}" "${methods[@]}" --tasks "$known" --lengths "$longest" --samples "$samples" \
            --seconds "$(left)" --resume "$OUT/tasks" --json "$OUT/tasks-$samples.json" > "$OUT/tasks-$samples.txt" && cp "$OUT/tasks-$samples.json" "$OUT/tasks-done.json"
    done
fi
if [ -n "$part" ]; then
    python -m lab recovery "${model[@]}" --weights "$predictor" --lengths "$lengths" --budgets "$budgets" --tasks "$known,text" --samples "$prompts" \
        --steps 16 --group before --heads together --seconds "${SERVED_SECONDS:-85}" --json "$OUT/served.json" > "$OUT/served.txt"
    values=("M, steps=--calibrate 1,2,5,12,20" "b, tokens=--block 8,16,32,64" "H, steps=--history 16,32,64,128"
        "share a step=--calibrate 1000000 --rotate 4,8,16,32,64" "steps between predictions=--every 1,4,8,16")
    for number in "${!values[@]}"; do
        read -ra setting <<< "${values[number]#*=}"
        python -m lab recovery "${model[@]}" --weights "$predictor" "${varied[@]}" "${paper[@]}" "${setting[@]}" --json "$OUT/varied-${values[number]%%=*}.json" > "$OUT/varied-$number.txt"
    done
    [ "$(left)" -gt 15 ] && tandem eval tasks "${model[@]}" --config "$OUT/predicted-profiles.yaml" --method full --method profile:exact --method profile:blocks \
        --method profile:both --method profile:sampled --tasks "$known" --lengths "$longest" --samples "${rounds%% *}" --seconds "$(left)" \
        --resume "$OUT/tasks-profiles" --json "$OUT/tasks-profiles.json" > "$OUT/tasks-profiles.txt"
fi
wait
files=()
for name in recovery served fidelity; do [ -e "$OUT/$name.json" ] && files+=("--$name" "$OUT/$name.json"); done
for task in needle text; do [ -e "$OUT/errors-$task.json" ] && files+=(--errors "$OUT/errors-$task.json"); done
for which in done profiles; do [ -e "$OUT/tasks-$which.json" ] && files+=(--tasks "$OUT/tasks-$which.json"); done
for json in "$OUT"/varied-*.json; do name=${json##*/varied-} && [ -e "$json" ] && files+=(--ablation "${name%.json}=$json"); done
python -m lab predicted "${files[@]}" --machine "${MACHINE:-one NVIDIA H200}" --date "$(date +%F)" --out "$OUT/predicted.json"
