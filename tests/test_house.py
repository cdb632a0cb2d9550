"""The house keeps its own rules: layers, style, types, pins, and a README whose commands exist."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import NamedTuple

import typer

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
NOT_OURS = {"build", "dist", "results", "__pycache__"}
MAKE_TARGET = re.compile(r"^([a-z][a-z-]*):", re.MULTILINE)
VERBLESS = re.compile(
    "(A|An|The|What|Whether|How|Where|When|Which|Who|Those|These|This|That|All|Each|Every|One|Two|Of|For|If|In|As|With|No"
    "|Its?|Their|Others?|Some|Several|Rows|Tokens|Bytes|Keys|Values|Pages|Blocks)\\b"
)
COMPILED = re.compile(r"triton\.jit|numba\.njit|inner|intrinsic")
WIDE = {
    "cpu/row_products.py",
    "gpu/operations/recurrent/delta_net.py",
    "gpu/operations/recurrent/delta_step.py",
    "transfer/simd/packed_rows.py",
    "transfer/simd/rounded_rows.py",
    "transfer/simd/row_tiles.py",
    "transfer/simd/vectors.py",
}
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
    for extra, wanted in (("cpu", "fbgemm-gpu-cpu"), ("cuda", "fbgemm-gpu")):
        assert [name for line in extras[extra] if (name := line.partition("==")[0]).startswith("fbgemm")] == [wanted]


def test_every_package_is_in_the_layers() -> None:
    project = read_project()
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests"}
    assert packages == set(project["tool"]["importlinter"]["root_packages"])
    patterns = project["tool"]["setuptools"]["packages"]["find"]["include"]
    assert packages - {"lab"} == {pattern.rstrip("*") for pattern in patterns}, "the laboratory is not installed"


def test_every_folder_of_modules_is_a_package() -> None:
    folders = {path.parent for path in list_files(".py") if path.relative_to(ROOT).parts[0] not in ("tests", "deploy")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


class Words(NamedTuple):
    """What a module says. is_introduced: it is empty, or says what it is; docstrings: each in one line; of_functions:
    names and docstrings; wide: functions of more than eight arguments, but those that a compiler takes.
    """

    is_introduced: bool
    docstrings: list[str]
    of_functions: list[tuple[str, str]]
    wide: list[str]


def list_statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Yield statements at any depth, without the expressions in them, which are nine nodes of ten."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        if hasattr(node, "body"):
            children = ast.iter_child_nodes(node)
            waiting += [one for one in children if isinstance(one, ast.stmt | ast.excepthandler | ast.match_case)]


@cache  # of the words alone: trees of all files would keep the garbage collector busy
def read_words(path: Path) -> Words:
    """Return what a module says, and which of its functions take too much."""
    tree = ast.parse(path.read_text())
    docstrings, of_functions, wide = [ast.get_docstring(tree)], [], []
    for node in list_statements(tree):
        if isinstance(node, ast.ClassDef):
            docstrings.append(ast.get_docstring(node))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            docstrings.append(ast.get_docstring(node))
            of_functions.append((node.name, docstrings[-1] or ""))
            names = {argument.arg for argument in node.args.args + node.args.kwonlyargs} - {"self", "cls"}
            if len(names) > 8 and not any(COMPILED.match(ast.unparse(one)) for one in node.decorator_list):
                wide.append(node.name)
    spoken = [" ".join((text or "").split()) for text in docstrings]
    return Words(not tree.body or docstrings[0] is not None, spoken, of_functions, wide)


def test_every_module_says_what_it_is() -> None:
    mute = [str(path) for path in list_files(".py") if not read_words(path).is_introduced]
    assert mute == [], "a module opens with a docstring"


def test_no_docstring_says_a_sentence_twice() -> None:
    twice = []
    for path in list_files(".py"):
        for text in read_words(path).docstrings:
            sentences = [one for one in re.split(r"(?<=[.!?]) ", text) if len(one) > 20]
            twice += [f"{path}: {one}" for one in set(sentences) if sentences.count(one) > 1]
    assert twice == []


def test_what_a_function_does_is_said_by_a_verb_first() -> None:
    """Not by an article, a question word, a number or what it is of; tests' own functions aside."""
    verbless = [
        f"{path.relative_to(ROOT)}: {name}: {text[:60]}"
        for path in list_files(".py") if path.relative_to(ROOT).parts[0] != "tests"
        for name, text in read_words(path).of_functions if VERBLESS.match(text)
    ]  # fmt: skip
    assert verbless == []


def test_what_a_module_holds_or_does_is_said_by_a_verb_first() -> None:
    """As of functions; the tests' modules aside, whose first lines are what they test."""
    heads = {
        path.relative_to(ROOT): read_words(path).docstrings[0]
        for path in list_files(".py") if "tests" not in path.relative_to(ROOT).parts
    }  # fmt: skip
    assert len(heads) > 500
    assert [f"{path}: {head[:60]}" for path, head in heads.items() if VERBLESS.match(head)] == []


def test_no_function_takes_more_than_eight_arguments() -> None:
    """But command lines, what emits vectors of compiled code, and recurrent steps, whose tensors are all their own."""
    wide = {
        path.relative_to(ROOT).as_posix()
        for path in list_files(".py") if path.relative_to(ROOT).parts[0] != "tests" and read_words(path).wide
    }  # fmt: skip
    assert {path for path in wide if not re.search(r"(command|commands|cli)\.py$|/commands/", path)} == WIDE


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
