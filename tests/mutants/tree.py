"""A copy of the project to be broken: what git would commit, large files as links, one fault in it at a time.

Tests that run here import the copy and write nowhere else. Python's and numba's caches are kept true to what is in the
files: numba keys a compiled function by its own file alone, so what a fault reaches through imports is compiled anew.
"""

import ast
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.mutants.faults import Fault

LARGE_BYTES = 1 << 20  # a file of this size is data: linked, not copied


class Tree:
    def __init__(self, root: Path, folder: Path, threads: int) -> None:
        """Copies the project at `root` to `folder`, its tests to run on `threads` threads each."""
        self.root = folder / "tree"
        self.numba_cache = folder / "numba"
        self.scratch = folder / "numba-with-a-fault"
        self.threads = threads
        for name in list_files(root):
            source, target = root / name, self.root / name
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.stat().st_size < LARGE_BYTES:
                shutil.copy2(source, target)
            else:
                target.symlink_to(source)
        self.importers = find_importers(self.root)

    def environment(self, numba_cache: Path) -> dict[str, str]:
        """Of a test run: it imports the copy, and hypothesis (by `CI`) draws the same examples for all faults."""
        inherited = ("PYTEST_XDIST_", "PYTEST_CURRENT_TEST")  # where a test of this command runs it
        kept = {name: value for name, value in os.environ.items() if not name.startswith(inherited)}
        return kept | {
            "PYTHONPATH": str(self.root),
            "NUMBA_CACHE_DIR": str(numba_cache),
            "OMP_NUM_THREADS": str(self.threads),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin take the cores of the other tree
            "CI": "true",
            "PYTHONDONTWRITEBYTECODE": "1",  # a fault of a text's length, within its second, would be read as the text
        }

    def find_strangers(self, files: set[str]) -> list[str]:
        """Those of `files` that are modules of packages but would be imported from elsewhere."""
        names = {module_name(file): str(self.root / file) for file in files if is_module(self.root, file)}
        program = (
            "import importlib.util, json, sys\n"
            "found = {name: importlib.util.find_spec(name).origin for name in json.load(sys.stdin)}\n"
            "json.dump(found, sys.stdout)"
        )
        done = subprocess.run(
            [sys.executable, "-c", program],
            input=json.dumps(list(names)),
            cwd=self.root,
            env=self.environment(self.numba_cache),
            capture_output=True,
            text=True,
            check=True,
        )
        found = json.loads(done.stdout)
        return [f"{name}: {found[name]}" for name, path in names.items() if found[name] != path]

    @contextmanager
    def broken_by(self, fault: Fault) -> Iterator[Path]:
        """The fault is in the tree. Yields a numba cache that knows nothing of what the fault may have changed."""
        path = self.root / fault.file
        source, times = path.read_text(), path.stat()
        forget_bytecode(path)
        path.write_text(fault.apply(source))
        try:
            yield self.fresh_cache(fault)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            forget_bytecode(path)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def fresh_cache(self, fault: Fault) -> Path:
        """The cache of the sound tree, less what was compiled from modules that import the faulty one."""
        stale = [Path(file) for file in self.importers.get(fault.file, {fault.file})]
        self.scratch.mkdir()
        for folder in self.numba_cache.glob("*"):  # {name of the module's folder}_{hash of its path}
            gone = tuple(f"{file.stem}." for file in stale if file.parent.name == folder.name.rpartition("_")[0])
            (self.scratch / folder.name).mkdir()
            for entry in folder.iterdir():
                if not entry.name.startswith(gone):
                    os.link(entry, self.scratch / folder.name / entry.name)  # numba replaces files, never writes in one
        return self.scratch


def list_files(root: Path) -> list[str]:
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return sorted({name for name in listed.split("\0") if name and (root / name).is_file()})


def is_module(root: Path, file: str) -> bool:
    path = root / file
    return path.suffix == ".py" and (path.parent / "__init__.py").exists()


def module_name(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def find_importers(root: Path) -> dict[str, set[str]]:
    """Of each file of the packages: itself and all files that import it, directly or through others."""
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    files = [str(path) for path in found if not path.parts[0].startswith(".")]  # no environment of the project's own
    modules = {module_name(file): file for file in files if is_module(root, file) and not file.startswith("tests/")}
    importers: dict[str, set[str]] = {file: set() for file in modules.values()}
    for file in modules.values():
        for node in ast.walk(ast.parse((root / file).read_text())):
            named = []
            if isinstance(node, ast.Import):
                named = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module:
                named = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            for module in {prefix for name in named for prefix in prefixes(name)} & modules.keys():
                importers[modules[module]].add(file)
    return {file: reach(importers, file) for file in importers}


def prefixes(name: str) -> list[str]:
    """`a.b.c` as `a`, `a.b` and `a.b.c`: what an import of it runs."""
    parts = name.split(".")
    return [".".join(parts[: end + 1]) for end in range(len(parts))]


def reach(edges: dict[str, set[str]], start: str) -> set[str]:
    seen, open_ends = {start}, [start]
    while open_ends:
        new = edges[open_ends.pop()] - seen
        seen |= new
        open_ends += new
    return seen


def forget_bytecode(path: Path) -> None:
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()
