"""ollama's JavaScript client, which `ollama_js.mjs` is written with: its script, and a process of node."""

import subprocess
import sys
from pathlib import Path

from script import REFERENCE_URL, SCRIPTED_URL, call, check_over, say

say(call("add", a=2, b=3), "It is 5.", call("add", a=2, b=3))
program = Path(__file__).with_suffix(".mjs")
done = subprocess.run(["node", program, *(url.removesuffix("/v1") for url in (SCRIPTED_URL, REFERENCE_URL))])
if done.returncode:
    sys.exit(done.returncode)
check_over()
