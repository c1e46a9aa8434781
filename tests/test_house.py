"""Rules for names: classes of the package, tests; and how helpers are imported."""

from __future__ import annotations

import ast
import configparser
import functools
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.conftest import pytest_configure
from tests.support import ROOT

MAX_NAME_CHARS = 60


@functools.cache
def texts() -> dict[Path, str]:
    """The text of each file of the tests, by its path relative to the root."""
    return {path.relative_to(ROOT): path.read_text() for path in sorted((ROOT / "tests").rglob("*.py"))}


def nodes(candidate: str) -> Iterator[tuple[Path, ast.AST]]:
    """Walk through the files whose text matches a pattern: to parse all of them takes seconds."""
    for path, text in texts().items():
        if re.search(candidate, text, re.M):
            for node in ast.walk(ast.parse(text)):
                yield path, node


def imported_names(node: ast.AST) -> list[str]:
    """The modules that a statement imports; one that is no import gives none."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return ["." * node.level + (node.module or "")] if isinstance(node, ast.ImportFrom) else []


def test_test_names_have_at_most_60_characters() -> None:
    names = [
        (str(path), name)
        for path, text in texts().items()
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", text, re.M)
    ]
    assert len(names) > 1000
    assert [name for name in names if len(name[1]) > MAX_NAME_CHARS] == []


def test_class_names_are_unique_in_the_package() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "segapp").rglob("*.py")):
        if "examples" not in path.parts:  # programs of the documentation, each on its own
            for name in re.findall(r"^class (\w+)", path.read_text(), re.M):
                places.setdefault(name, []).append(str(path.relative_to(ROOT)))
    assert len(places) > 500
    assert {name: paths for name, paths in places.items() if len(paths) > 1} == {}


def test_tests_never_use_sys_path() -> None:
    assert {str(path) for path, node in nodes(r"sys\.path\b") if is_sys_path(node)} == set()


def is_sys_path(node: ast.AST) -> bool:
    """True for the expression `sys.path`."""
    return isinstance(node, ast.Attribute) and node.attr == "path" and ast.unparse(node) == "sys.path"


def test_helpers_are_imported_by_their_full_name() -> None:
    modules = {path.stem for path in texts()} - {"__init__"}
    bare = [
        f"{path}: {name}"
        for path, node in nodes(rf"^ *(?:import|from) +(?:\.|(?:{'|'.join(modules)})\b)")
        for name in imported_names(node)
        if name.startswith(".") or name.partition(".")[0] in modules
    ]
    assert bare == []


def test_page_of_the_stand_ins_for_a_gpu_names_each_module() -> None:
    folder = ROOT / "tests" / "support" / "gpu"
    rows = [line.split("|") for line in (folder / "README.md").read_text().splitlines() if line.startswith("| `")]
    assert sorted(row[1].strip(" `") for row in rows) == sorted(
        {path.stem for path in folder.glob("*.py")} - {"__init__"}
    )
    assert all(row[2].strip() and row[3].strip() for row in rows), "it says what each pretends and cannot show"


def test_files_that_the_page_of_the_tests_names_exist() -> None:
    named = set(
        re.findall(r"(?:tests|support|segapp)/[\w/]+\.(?:py|md|toml)", (ROOT / "tests" / "README.md").read_text())
    )
    assert "support/fork_server.py" in named
    assert [path for path in named if not ((ROOT / path).is_file() or (ROOT / "tests" / path).is_file())] == []


def test_digits_are_asked_for_as_int_reads_them() -> None:
    """`"²".isdigit()` is true, and int("²") is an error."""
    files = sorted((ROOT / "segapp").rglob("*.py"))
    assert [path.name for path in files if re.search(r"\.is(digit|numeric)\b", path.read_text())] == []


def test_cudnn_flags_say_that_cudnn_is_on() -> None:
    """`torch.backends.cudnn.flags` switches cuDNN off unless it is called with `enabled`."""
    calls = [
        (f"{path}:{node.lineno}", {keyword.arg for keyword in node.keywords})
        for path, node in nodes(r"cudnn\.flags\(")
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("cudnn.flags")
    ]
    assert len(calls) >= 3
    assert [place for place, keywords in calls if "enabled" not in keywords] == []


def test_no_parameter_has_the_name_of_a_plugins_fixture() -> None:
    """pytest-benchmark and pytest-mock, where they are installed, take such a parameter for their fixture."""
    names = {"benchmark", "mocker", "testdir"}
    found = [
        f"{path}: {node.name}"
        for path, node in nodes(rf"\b({'|'.join(names)})\b")
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if names & {argument.arg for argument in (*node.args.args, *node.args.kwonlyargs)}
    ]
    assert found == []


def test_gate_checks_names_in_tests_that_it_does_not_run() -> None:
    assert "$uv run mypy --config-file tests/mypy.ini" in (ROOT / ".ci" / "run").read_text()
    settings = configparser.ConfigParser()
    settings.read(ROOT / "tests" / "mypy.ini")
    assert {"tests/gpu", "tests/benchmarks", "tests/support"} <= set(settings["mypy"]["files"].split(", "))
    left_out = set(settings["mypy"]["disable_error_code"].split(", "))
    assert not left_out & {"attr-defined", "call-arg", "name-defined"}


def test_ports_that_ranks_meet_at_are_free_ones() -> None:
    """A number in the text of a test may be taken; those here are not listened at, or on machines of a test's own."""
    unused = {"test_machines.py", "test_launchers.py", "test_ranks.py", "test_parallel_training.py"}
    fixed = {path.name for path, text in texts().items() if re.search(r"MASTER_PORT\W+\d", text)}
    assert fixed <= unused


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", "not slow and not gpu and not benchmark and not faults_long"),
        ("not faults", "(not faults) and not slow and not gpu and not benchmark and not faults_long"),
        ("faults_long", "faults_long"),
        ("slow or not slow", "slow or not slow"),
    ],
)
def test_long_tests_run_only_if_their_marker_is_named(chosen: str, expected: str) -> None:
    config = SimpleNamespace(option=SimpleNamespace(markexpr=chosen))
    for _ in range(2):  # a worker of pytest-xdist takes the expression of the controller
        pytest_configure(config)
        assert config.option.markexpr == expected
