#!/usr/bin/env bash
# A mixture of experts, Qwen3-30B-A3B: steps and a prompt of 16K on the card by weights, and with experts in host memory
# inside 23 GiB; Mixtral there, whose rows soon take the same experts. `experts.sh FOLDER PART...` runs some parts alone;
# `cpu` among them: at a small size on the CPU device.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
shape=qwen3-30b-a3b mixtral=mixtral-8x7b of_k=Q4_K parts=() prompts=16384 host_prompts=4096,16384 short=4096 chunk=2048 steps=24 host_steps=32
on_card=(--on-card 28) by_plan=() engine=() host=(--memory-gib 23)
for word in "${@:2}"; do
    if [ "$word" = cpu ]; then
        shape=tiny-qwen3-moe mixtral=tiny-qwen3-moe of_k=Q4_0 prompts=64 host_prompts=64 short=64 chunk=32 steps=12 host_steps=8
        on_card=(--on-card 5) by_plan=(--on-card 5) engine=(--device cpu --dtype bfloat16) host=(--memory-gib 2 --device cpu)
    else
        parts+=("$word")
    fi
done
[ ${#parts[@]} = 0 ] && parts=(bf16 int4 fp8 host-bf16 host-int4 host-Q4_K host-Q8_0 host-mixtral)

card() { # name weights...
    tandem bench engine --random-weights "$shape" "${@:2}" --batch 1,4,16 --steps "$steps" --rounds 1 --prompts "$prompts" \
        --chunk-tokens "$chunk" "${engine[@]}" --json "$OUT/experts-$1.json"
}
in_host_memory() { # name shape prompts options...
    python -m lab kernel host-experts --shape "$2" --batch 1,4,16 --prompts "$3" --chunk-tokens "$chunk" --steps "$host_steps" \
        "${host[@]}" "${@:4}" --json "$OUT/experts-in-host-memory-$1.json"
}
for part in "${parts[@]}"; do
    echo "== $part"
    case $part in
    # Aim: at batch 1 in bf16 1.6 times its floor or less.  45 s each
    bf16) card bf16 ;;
    int4) card int4 --weights int4 ;;
    fp8) card fp8 --weights fp8 ;;
    host-bf16) in_host_memory bf16 "$shape" "$host_prompts" "${by_plan[@]}" ;; # 150 s, and 48 GiB of host memory
    # In which all of it would fit the card: 28 of 128 there, as of bf16.  90 s each
    host-int4) in_host_memory int4 "$shape" "$short" --weights int4 "${on_card[@]}" ;;
    host-Q4_K) in_host_memory Q4_K "$shape" "$short" --weights "$of_k" "${on_card[@]}" ;;
    host-Q8_0) in_host_memory Q8_0 "$shape" "$short" --weights Q8_0 "${by_plan[@]}" ;;
    # By rates the CPU is the faster for few rows alone: 12 of them beside PCIe 4 and 8 threads.  90 s
    host-mixtral) in_host_memory mixtral "$mixtral" "$short" --weights int4 "${by_plan[@]}" ;;
    *) echo "experts.sh: no part is called $part" >&2 && exit 2 ;;
    esac
done
