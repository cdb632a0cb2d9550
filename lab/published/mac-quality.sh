#!/usr/bin/env bash
# MAC-Attention: tasks and answers over thresholds, windows and placements, beside methods at equal reads.
set -euo pipefail
OUT=${1:-build/published}
python -m lab mac --report --out "$OUT/mac" --lengths 4096,16384 --samples 16 --forced-samples 8 --served-samples 16 --processes 5 --error-steps 64 --seconds "${SECONDS_LEFT:-290}"
