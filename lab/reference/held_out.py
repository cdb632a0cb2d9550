"""Write the novels that training held out: `python -m lab.reference.held_out --text FILE.xz --out FILE.txt`.

The evaluations take the file as `--text`. The invariant: no novel of the written text was trained on, provided that the
run had the same text. The last line is JSON.
"""

import argparse
import json
from pathlib import Path

from lab.reference.corpus import read_text, split_novels
from lab.reference.train import HELD_OUT_SHARE


def main(given: list[str] | None = None) -> None:
    """Split the text as training does, and write its second part. Raises FileExistsError if the file exists."""
    parser = argparse.ArgumentParser(description="Write the held-out novels of a training text.")
    parser.add_argument("--text", type=Path, required=True, help="the text that the model was trained with")
    parser.add_argument("--out", type=Path, required=True, help="a new UTF-8 file; keep it outside the repository")
    arguments = parser.parse_args(given)
    training, held_out = split_novels(read_text(arguments.text, None), HELD_OUT_SHARE)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("x", encoding="utf-8") as file:
        file.write(held_out)
    told = {"out": str(arguments.out), "characters": len(held_out), "words": len(held_out.split())}
    print(json.dumps({**told, "share": round(len(held_out) / (len(training) + len(held_out)), 4)}))


if __name__ == "__main__":
    main()
