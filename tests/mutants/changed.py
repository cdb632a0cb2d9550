"""`python -m tests.mutants.changed`: run cosmic-ray on the lines that changed, and print the mutants that survive.

Each changed file of the product has a session of its own in a copy of the project, with the tests that import it.
"""

import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Annotated

import typer

from tests.mutants.tree import PACKAGES, Tree, imported_modules, list_files, module_name

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
# One replacement for each operator; a function without its decorator is another program (numba, pytest).
LEFT_OUT = (
    "core/ReplaceBinaryOperator_(?!Add_Sub|Sub_Add|Mul_Div|Div_Mul|FloorDiv_Mul|Mod_Add|BitAnd_BitOr|BitOr_BitAnd)",
    "core/ReplaceComparisonOperator_(?!Eq_NotEq|NotEq_Eq|Lt_LtE|LtE_Lt|Gt_GtE|GtE_Gt|Is_IsNot|IsNot_Is)",
    "core/ReplaceUnaryOperator",
    "core/RemoveDecorator",
)


def main(
    files: Annotated[list[Path] | None, typer.Argument(help="Files to mutate; those that changed if none.")] = None,
    base: Annotated[str, typer.Option(help="What the changes are counted from.")] = "HEAD~1",
    tests: Annotated[list[str] | None, typer.Option(help="Tests to run instead of those that import the file.")] = None,
    whole: Annotated[bool, typer.Option("--whole", help="Mutate every line of the files.")] = False,
) -> None:
    """Mutate the lines that changed since `base`, one at a time, and report those that the tests let pass."""
    if not (BIN / "cosmic-ray").exists():
        raise typer.BadParameter("cosmic-ray is not installed; `make mutants-changed` installs it")
    changed = find_changed_lines(base)
    chosen = [str(path) for path in files] if files else sorted(changed)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        tree = Tree(ROOT, Path(folder).resolve(), threads=os.cpu_count() or 1)
        for file in chosen:
            lines = ["1-1000000"] if whole else changed.get(file, [])
            run_session(tree, file, lines, tests or find_tests(file))


def find_changed_lines(base: str) -> dict[str, list[str]]:
    """Return the changed lines of each product file as ranges, `3-7`. Files that git does not know yet count whole."""
    diff = _git("diff", "-U0", "--no-color", "--no-ext-diff", base, "--", *(f"{name}/*.py" for name in PACKAGES))
    found = read_changed_lines(diff)
    new = _git("ls-files", "--others", "--exclude-standard", "--", *(f"{name}/*.py" for name in PACKAGES))
    return found | {file: ["1-1000000"] for file in new.splitlines()}


def read_changed_lines(diff: str) -> dict[str, list[str]]:
    """Return the ranges of lines that a unified diff without context adds, for each file."""
    found: dict[str, list[str]] = {}
    file = ""
    for line in diff.splitlines():
        if line.startswith("+++ "):
            file = line.removeprefix("+++ b/")
        elif match := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            begin, count = int(match[1]), int(match[2] or 1)
            if count:
                found.setdefault(file, []).append(f"{begin}-{begin + count - 1}")
    return found


def find_tests(file: str) -> list[str]:
    """Return the test files that import the module of `file`."""
    module = module_name(file)
    tests = [name for name in list_files(ROOT) if re.search(r"(^|/)test_\w+\.py$", name)]
    return [name for name in tests if module in imported_modules((ROOT / name).read_text())]


def run_session(tree: Tree, file: str, lines: list[str], tests: list[str]) -> None:
    if not lines or not tests:
        print(f"{file}: {'no test imports it' if lines else 'no line changed'}; nothing to try")
        return
    print(f"{file}, by {' '.join(tests)}", flush=True)
    sound = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    begin = time.monotonic()
    subprocess.run(sound, cwd=tree.root, env=tree.environment(tree.numba_cache), check=True)
    seconds = 60 + 3 * (time.monotonic() - begin)
    kept = tree.cache_without(file)
    scratch = tree.root.parent / "scratch"
    trial = f"rm -rf {scratch}; cp -rl {kept} {scratch}; exec {shlex.join(sound)}"
    config = tree.root.parent / "session.toml"
    config.write_text(write_config(file, lines, shlex.join(["sh", "-c", trial]), seconds))
    session = config.with_suffix(".sqlite")
    session.unlink(missing_ok=True)
    environment = tree.environment(scratch)
    for command in (
        ["cosmic-ray", "init", config, session],
        ["cr-filter-lines", "--config", config, session],
        ["cr-filter-operators", session, config],
        ["cosmic-ray", "exec", config, session],
        ["cr-report", "--surviving-only", "--show-diff", session],
    ):
        subprocess.run([BIN / command[0], *command[1:]], cwd=tree.root, env=environment, check=True)


def write_config(file: str, lines: list[str], command: str, seconds: float) -> str:
    """Return cosmic-ray's configuration. What JSON writes of strings and lists TOML reads alike."""
    return "\n".join(
        [
            "[cosmic-ray]",
            f"module-path = {json.dumps(file)}",
            f"timeout = {seconds:.1f}",
            "excluded-modules = []",
            f"test-command = {json.dumps(command)}",
            'distributor.name = "local"',
            "[cosmic-ray.filters.line-filter.lines]",
            f"{json.dumps(file)} = {json.dumps(lines)}",
            "[cosmic-ray.filters.operators-filter]",
            f"exclude-operators = {json.dumps(LEFT_OUT)}",
            "",
        ]
    )


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    typer.run(main)
