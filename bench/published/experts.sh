#!/usr/bin/env bash
# A mixture of experts, Qwen3-30B-A3B: steps on the card by weights, and in bf16 inside 23 GiB with experts in host memory.
set -uo pipefail
OUT=${1:-build/published}
mkdir -p "$OUT"
tandem bench engine --random-weights qwen3-30b-a3b --batch 1,4,16 --steps 24 --rounds 1 --json "$OUT/experts-bf16.json" # 40 s
tandem bench engine --random-weights qwen3-30b-a3b --weights int4 --batch 1,4,16 --steps 24 --rounds 1 --json "$OUT/experts-int4.json"
tandem bench kernel host-experts --shape qwen3-30b-a3b --memory-gib 23 --batch 1,4 --prompts 4096,16384 --steps 32 \
    --json "$OUT/experts-in-host-memory.json" # 110 s, and 48 GiB of host memory
