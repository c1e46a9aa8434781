"""Each operator on a source written by hand; a tiny package whose survivor and killed mutant are known."""

from __future__ import annotations

import os
import time
from pathlib import Path

import coverage
import pytest

from tests.mutation import running, selection
from tests.mutation.campaign import (
    Campaign,
    Result,
    find_mutants,
    judged,
    read_results,
    sampled,
    score_lines,
)
from tests.mutation.operators import mutants_of
from tests.mutation.selection import files_that_import, module_of
from tests.support import ROOT


def changes(source: str, operator: str) -> list[str]:
    """The sources that an operator makes of one."""
    data = source.encode()
    return [each.applied_to(data).decode() for each in mutants_of("x.py", data) if each.operator == operator]


@pytest.mark.parametrize(
    ("operator", "source", "expected"),
    [
        ("comparison", "a < b", ["a <= b"]),
        ("comparison", "a >= b != c", ["a > b != c", "a >= b == c"]),
        ("comparison", "'é'; a is None", ["'é'; a is not None"]),
        ("comparison", "x not in y", ["x in y"]),
        ("constant", "f(2)", ["f(3)", "f(1)"]),
        ("constant", "a = 0", ["a = 1", "a = (-1)"]),
        ("constant", "a: T[3] = 0.5; b = True", ["a: T[3] = 1.5; b = True", "a: T[3] = (-0.5); b = True"]),
        ("statement", "x.go()", ["pass"]),
        ("statement", "x += 1\ny = 2\nz.a = 3", ["pass\ny = 2\nz.a = 3", "x += 1\ny = 2\npass"]),
        ("statement", "if a:\n    raise E(\n        1\n    )\n", ["if a:\n    pass\n"]),
        ("negation", "if not a: b = -c", ["if (a): b = -c", "if not a: b = (c)"]),
        ("arguments", "f(a, b, c=d)", ["f(b, a, c=d)"]),
        ("arguments", "f(a, a); f(*a, b)", []),
        ("arguments", "max(a, b); max(a, b, c)", ["max(a, b); max(b, a, c)"]),
        ("statement", "logger.warning(a)\nlog.warning(a)", ["logger.warning(a)\npass"]),
        (
            "exception",
            "try:\n    a\nexcept E:\n    b\n    raise F from None\nexcept G:\n    c\n",
            ["try:\n    a\nexcept E:\n    pass\nexcept G:\n    c\n"],
        ),
    ],
)  # fmt: skip
def test_operator_changes_one_place(operator: str, source: str, expected: list[str]) -> None:
    assert changes(source, operator) == expected


def test_docstrings_types_and_f_strings_are_left_alone() -> None:
    source = (
        '"""Text."""\nif TYPE_CHECKING:\n    f(1)\ndef g(a: X[1]) -> Y[2]:\n    """Text."""\n    return f"{1 < a}"\n'
    )
    assert mutants_of("x.py", source.encode()) == []


@pytest.mark.slow
def test_mutants_of_segapp_have_unique_ids_and_functions() -> None:
    mutants = find_mutants(["metrics"])
    ids = [mutant.id for mutant in mutants]
    assert len(set(ids)) == len(ids) > 20
    assert {mutant.package for mutant in mutants} == {"metrics"}
    assert any(mutant.function_line for mutant in mutants)
    assert sampled(mutants, 1, 5) == sampled(mutants, 1, 5) != sampled(mutants, 2, 5)
    assert module_of("losses/__init__.py") == "segapp.losses"
    assert "tests/test_metrics.py" in files_that_import("segapp.metrics")


@pytest.fixture(scope="module")
def tiny_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package `segapp` of one module; its test, in a subprocess too, sees one of its two branches."""
    root = tmp_path_factory.mktemp("tiny")
    (root / "segapp").mkdir()
    (root / "segapp" / "__init__.py").write_text("")
    (root / "segapp" / "other.py").write_text("a = 1\n")
    (root / "segapp" / "size.py").write_text(
        "def is_large(x):\n    return x > 10\n\n\ndef twice(x):\n    return x * 2\n"
    )
    (root / "test_size.py").write_text(
        "import subprocess, sys\n"
        "from segapp.size import is_large\n\n\n"
        "def test_size():\n"
        "    assert is_large(20) and not is_large(3)\n"
        "    code = 'from segapp.size import twice; assert twice(3) == 6'\n"
        "    assert subprocess.run([sys.executable, '-c', code]).returncode == 0\n"
    )
    (root / "test_bad.py").write_text("import segapp.size\n\n\ndef test_bad():\n    assert False\n")
    return root


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mutant_id", "outcome"),
    [
        ("size.py:2:comparison:0", "survived"),  # nothing asks about 10 itself
        ("size.py:6:constant:0", "killed"),  # in the subprocess
        ("other.py:1:constant:0", "not run: no test imports the module"),
    ],
)
def test_survivor_and_killed_mutant_are_told_apart(tiny_package: Path, mutant_id: str, outcome: str) -> None:
    mutants = {mutant.id: mutant for mutant in find_mutants(root=tiny_package / "segapp")}
    before = (tiny_package / "segapp" / "size.py").read_bytes()
    campaign = Campaign(tiny_package / "results.jsonl", root=tiny_package)
    assert campaign.outcome_of(mutants[mutant_id], ["test_size.py"])[0] == outcome
    assert (tiny_package / "segapp" / "size.py").read_bytes() == before


@pytest.mark.slow
def test_test_that_fails_anyway_kills_no_mutant(tiny_package: Path) -> None:
    mutants = {mutant.id: mutant for mutant in find_mutants(root=tiny_package / "segapp")}
    campaign = Campaign(tiny_package / "results.jsonl", root=tiny_package)
    tests = ["test_bad.py::test_bad", "test_size.py::test_size"]
    assert campaign.outcome_of(mutants["size.py:2:comparison:0"], tests) == ("survived", "")
    assert campaign.outcome_of(mutants["size.py:2:comparison:0"], tests[:1])[0].startswith("not run: no test")


def test_tests_of_a_line_are_chosen_by_package_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = next(each for each in find_mutants(["metrics"]) if each.function_line)
    seconds = {
        "tests/test_metrics.py::test_a": 9,
        "tests/run/test_b.py::test_b[1 - |]": 2,
        "tests/run/test_c.py::test_c": 1,
    }
    data = coverage.CoverageData(str(tmp_path / "coverage"))
    for test in (*seconds, "tests/test_metrics.py::test_that_failed"):
        data.set_context(f"{test}|run")
        data.add_lines({str(ROOT / "segapp" / mutant.path): [mutant.line]})
    data.set_context("tests/test_metrics.py::test_of_another_line|run")
    data.add_lines({str(ROOT / "segapp" / mutant.path): [mutant.line + 100]})
    data.write()
    monkeypatch.setattr(selection, "_LINES", tmp_path / "coverage")
    monkeypatch.setattr(selection, "recorded_seconds", lambda: seconds)
    for cached in (selection._recorded, selection._contexts_of):
        cached.cache_clear()
    try:
        assert selection.tests_of(mutant, 11) == ["tests/test_metrics.py::test_a", "tests/run/test_c.py::test_c"]
        assert selection.tests_of(mutant, 0) == ["tests/test_metrics.py::test_a"]
    finally:
        for cached in (selection._recorded, selection._contexts_of):
            cached.cache_clear()


@pytest.mark.slow  # a whole pytest with coverage
def test_record_has_the_lines_and_the_time_of_each_test(tmp_path: Path) -> None:
    test = "tests/run/test_decode.py::test_torn_last_line_is_kept_back"
    assert selection.record(["-n", "1", "-q", test], tmp_path) == 0
    lines = coverage.CoverageData(str(tmp_path / "coverage"))
    lines.read()
    tests = lines.contexts_by_lineno(str(ROOT / "segapp/run/events/reader.py"))
    assert any(f"{test}|run" in each for each in tests.values())
    assert (tmp_path / "times.xml").read_text().count("<testcase ") == 1


@pytest.mark.slow
def test_campaign_resumes_and_skips_what_has_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Campaign, "outcome_of", lambda *_: ("survived", ""))
    mutants = find_mutants(["metrics"])[:6]
    path = tmp_path / "results.jsonl"
    first = list(Campaign(path).run(mutants[:4], 1))
    with path.open("a") as file:
        file.write('{"id": "cut')
    path.write_text(path.read_text().rpartition("\n")[0] + "\n")
    later = list(Campaign(path).run(mutants, 1))
    assert [each.id for each in first + later] == [mutant.id for mutant in mutants]
    assert list(Campaign(path).run(mutants, 0)) == []
    assert {each.id for each in read_results(path)} == {mutant.id for mutant in mutants}


def test_process_that_a_test_detached_is_killed_after_its_run() -> None:
    reading, writing = os.pipe()
    campaign = os.fork()
    if campaign == 0:
        running.adopt_orphans()
        test = os.fork()
        if test == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        os.waitpid(test, 0)
        running.kill_children()
        os._exit(0)
    os.close(writing)
    assert os.waitpid(campaign, 0)[1] == 0
    with open(reading, "rb") as pipe:
        assert pipe.read() == b""  # at once: nobody holds the other end


def test_score_counts_timeouts_and_leaves_out_what_did_not_run() -> None:
    line = (ROOT / "segapp" / "metrics.py").read_text().splitlines()[2].strip()
    outcomes = ["killed", "timeout", "survived", "not run: x"]
    results = [
        Result(f"metrics.py:3:constant:{i}", "metrics", "1 -> 2", each, "", 1, "", "", "")
        for i, each in enumerate(outcomes)
    ]
    lines = score_lines(results, {})
    assert "| metrics | 4 | 2 | 1 | 0 | 1 | 67 % | 67 % |" in lines
    assert lines[-1] == "- `metrics.py:3:constant:2`: `1 -> 2`"
    lines = score_lines(results, {("metrics.py", line, "1 -> 2"): "equivalent"})
    assert "| metrics | 4 | 2 | 1 | 1 | 1 | 67 % | 100 % |" in lines
    assert lines[-1] == ""


def test_judged_changes_are_of_the_source_and_have_a_reason() -> None:
    for (path, line, change), why in judged().items():
        source = (ROOT / "segapp" / path).read_text()
        assert line in source, f"{path}: {line} is gone: remove {change} from tests/mutation/judged"
        assert len(why) > 10, f"{path}: {change}"
