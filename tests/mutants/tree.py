"""A copy of the project in which one fault at a time is put: what git would commit, with large files as links.

numba keys a compiled function by its own file alone, so whatever imports the faulty file is compiled anew.
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

PACKAGES = ("server", "scheduler", "gpu", "cpu", "transfer")
LARGE_BYTES = 1 << 20  # a file of this size is data: linked, not copied


class Tree:
    def __init__(self, root: Path, folder: Path, threads: int) -> None:
        """Copy the project at `root` to `folder`. Its tests run on `threads` threads each."""
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
        """Return the environment of a test run: it imports the copy, and hypothesis draws the same (`CI`)."""
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
        """Return those of `files` that are modules of packages but would be imported from elsewhere."""
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
        """Put the fault into the tree and yield a numba cache without anything that the fault may have changed."""
        path = self.root / fault.file
        source, times = path.read_text(), path.stat()
        forget_bytecode(path)
        path.write_text(fault.apply(source))
        try:
            yield self.cache_without(fault.file)
        finally:
            path.write_text(source)
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            forget_bytecode(path)
            shutil.rmtree(self.scratch, ignore_errors=True)

    def cache_without(self, file: str) -> Path:
        """Return a copy of the sound tree's cache without what was compiled from modules that import `file`."""
        stale = [Path(name) for name in self.importers.get(file, {file})]
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir()
        for folder in self.numba_cache.glob("*"):  # {name of the module's folder}_{hash of its path}
            gone = tuple(f"{path.stem}." for path in stale if path.parent.name == folder.name.rpartition("_")[0])
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
    """Return for each file of the packages itself and all files that import it, directly or through others."""
    folders = [path for path in root.iterdir() if path.is_dir() and not path.name.startswith(".")]  # no environment
    files = [str(path.relative_to(root)) for folder in folders for path in folder.rglob("*.py")]
    modules = {module_name(file): file for file in files if is_module(root, file) and not file.startswith("tests/")}
    importers: dict[str, set[str]] = {file: set() for file in modules.values()}
    for file in modules.values():
        for module in imported_modules((root / file).read_text()) & modules.keys():
            importers[modules[module]].add(file)
    return {file: reach(importers, file) for file in importers}


def imported_modules(source: str) -> set[str]:
    """Return the names of all modules, and of their packages, that a module's text imports."""
    named = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            named += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            named += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return {prefix for name in named for prefix in prefixes(name)}


def prefixes(name: str) -> list[str]:
    """Return `a`, `a.b` and `a.b.c` for `a.b.c`: what an import of it runs."""
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
