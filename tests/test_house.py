"""The house keeps its own rules: layers, style, types, pins, and a README whose commands exist."""

import ast
import re
import subprocess
import sys
import tomllib
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NOT_OURS = {"build", "dist", "results", "__pycache__"}
MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
CODE_BLOCK = re.compile(r"^```(?:sh|bash|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def run(*command: str) -> None:
    done = subprocess.run([str(BIN / command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def list_files(*suffixes: str) -> list[Path]:
    """Files of the project with these suffixes; caches, environments and build products are none of it."""
    found = []
    for top in ROOT.iterdir():
        if top.name in NOT_OURS or (top.name.startswith(".") and top.name != ".ci"):
            continue
        for path in [top] if top.is_file() else top.rglob("*"):
            if path.is_file() and path.suffix in suffixes and not NOT_OURS & set(path.parts[len(ROOT.parts) :]):
                found.append(path)
    return sorted(path for path in found if not any(part.endswith(".egg-info") for part in path.parts))


def read_project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_imports_run_one_way_and_the_server_has_no_torch() -> None:
    run("lint-imports", "--no-cache")


def test_the_linter_has_nothing_to_say() -> None:
    run("ruff", "check", ".")


def test_every_file_is_formatted() -> None:
    run("ruff", "format", "--check", ".")


def test_types_hold() -> None:
    run("mypy")


def test_importing_the_command_line_loads_no_torch() -> None:
    heavy = "any(name in sys.modules for name in ('torch', 'triton', 'numba'))"
    run("python", "-c", f"import sys, server.commands.tandem; sys.exit({heavy})")


def test_every_entry_point_names_what_is_there() -> None:
    project = read_project()["project"]
    groups = {"console_scripts": project["scripts"], **project["entry-points"]}
    points = [EntryPoint(name, value, group) for group, named in groups.items() for name, value in named.items()]
    assert [point.name for point in points if callable(point.load())] == ["tandem", "bench", "eval", "train", "tune"]


def test_every_dependency_is_pinned() -> None:
    project = read_project()["project"]
    listed = [
        *project["dependencies"],
        *(line for extra in project["optional-dependencies"].values() for line in extra),
    ]
    loose = [line for line in listed if "==" not in line and not line.startswith("triton")]
    assert not loose, "triton alone has a range: torch and the GPU host choose it"


def test_the_extras_exclude_each_other() -> None:
    extras = read_project()["project"]["optional-dependencies"]
    assert [line.partition("==")[0] for line in extras["cpu"]] == ["fbgemm-gpu-cpu"]
    assert [line.partition("==")[0] for line in extras["cuda"]] == ["fbgemm-gpu"]


def test_every_package_is_in_the_layers() -> None:
    project = read_project()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(project["tool"]["importlinter"]["root_packages"])
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert packages - {"lab"} == {pattern.rstrip("*") for pattern in patterns}, "the laboratory is not installed"


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in list_files(".py") if path.relative_to(ROOT).parts[0] not in ("tests", "deploy")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


@cache  # of the words alone: trees of all files would keep the garbage collector busy
def read_docstrings(path: Path) -> tuple[bool, list[str]]:
    """Tell whether a module says what it is, or is empty, and return its docstrings, each in one line."""
    tree = ast.parse(path.read_text())
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return not tree.body or ast.get_docstring(tree) is not None, [" ".join(text.split()) for text in found]


def test_every_module_says_what_it_is() -> None:
    mute = [str(path) for path in list_files(".py") if not read_docstrings(path)[0]]
    assert mute == [], "a module opens with a docstring"


def test_no_docstring_says_a_sentence_twice() -> None:
    twice = []
    for path in list_files(".py"):
        for text in read_docstrings(path)[1]:
            sentences = [one for one in re.split(r"(?<=[.!?]) ", text) if len(one) > 20]
            twice += [f"{path}: {one}" for one in set(sentences) if sentences.count(one) > 1]
    assert twice == []


def test_no_file_points_outside_the_project() -> None:
    outside = ("../" + "shared", "/wo" + "rk/")
    suffixes = (".py", ".md", ".toml", ".yaml", ".json", ".sh", ".html", "", ".txt")
    named = [path for path in list_files(*suffixes) if path.name != "tokenizer.json"]
    found = [(str(path), word) for path in named for word in outside if word in path.read_text(errors="ignore")]
    assert not found


def readme_commands() -> list[str]:
    blocks = CODE_BLOCK.findall((ROOT / "README.md").read_text())
    return [line.split("  #")[0].strip() for block in blocks for line in block.splitlines() if line.strip()]


def test_the_readme_shows_commands() -> None:
    assert {"make run", "make test"} <= set(readme_commands())


def test_the_make_targets_of_the_readme_exist() -> None:
    targets = set(MAKE_TARGET.findall((ROOT / "Makefile").read_text()))
    named = {line.split()[1] for line in readme_commands() if line.startswith("make ")}
    assert named <= targets


def test_the_tandem_commands_and_options_of_the_readme_exist() -> None:
    from server.commands.tandem import app, load_groups

    load_groups("--help")
    root = typer.main.get_command(app)
    for line in readme_commands():
        words = line.removeprefix(".venv/bin/").split()
        if words[0] != "tandem":
            continue
        command = root.commands[words[1]]
        if hasattr(command, "commands"):
            command = command.commands[words[2]]
        options = {option for parameter in command.params for option in parameter.opts}
        asked = {word for word in words if word.startswith("--")}
        assert asked <= options, line
        for word in words[2:]:
            if word.startswith("deploy/"):
                assert (ROOT / word).exists(), line


def test_ci_runs_what_make_test_runs() -> None:
    path = ROOT / ".ci" / "run"
    assert path.stat().st_mode & 0o111
    assert "make test" in path.read_text()
