#!/bin/sh
# Print a Python that the project can use (3.11 or 3.12, with venv), or fail and say what is missing.
# Each candidate is run first, because a version manager's shim may exist and not work.
fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 12))'
for candidate in ${PYTHON:-} python3.12 python3.11 python3 python /usr/bin/python3.12 /usr/bin/python3.11; do
    if "$candidate" -c "$fits" >/dev/null 2>&1; then
        command -v "$candidate"
        exit 0
    fi
done
echo "error: no Python 3.11 or 3.12 with the venv module found; install one (Debian: apt install python3 python3-venv)," \
    "or name one: make PYTHON=/path/to/python3.12" >&2
exit 1
