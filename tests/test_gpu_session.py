"""The session on one card: its schedule, its stops and second starts, and the page from partial results."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu import session
from tests.gpu.cases import outcomes
from tests.gpu.report import page
from tests.gpu.schedule import (
    MINUTES,
    NEEDS,
    ROWS,
    START_MINUTES,
    Part,
    ScheduledRow,
    groups,
)
from tests.gpu.session import last_states, run_session
from tests.support import ROOT
from tests.support.live_runs import wait_for

CASES = """
import os, signal, subprocess, sys, time
from pathlib import Path
from tests.gpu.cases import Case, NotPossible

CALLS = Path(__file__).with_name("calls")


def called(name):
    with CALLS.open("a") as file:
        file.write(name + "\\n")
    return {"case": name, "calls": CALLS.read_text().split().count(name)}


def good(device):
    return [Case(name, lambda name=name: called(name)) for name in ("one", "two")]



def failing(device):
    def fail():
        called("fails")
        raise ValueError("7 is not 8\\nsecond line")
    return [Case("before", lambda: called("before")), Case("fails", fail), Case("after", lambda: called("after"))]


def killed(device):
    def die():
        called("dies")
        os.kill(os.getpid(), signal.SIGKILL)
    return [Case("before", lambda: called("before")), Case("dies", die), Case("after", lambda: called("after"))]


def leaving(device):
    def leave():  # a process in a session of its own, and one whose parent has ended
        nap = [sys.executable, "-c", "import time; time.sleep(60)"]
        orphan = "import subprocess as s, sys; print(s.Popen(sys.argv[1:], start_new_session=True, stdout=-3).pid)"
        pids = [subprocess.Popen(nap, start_new_session=True).pid]
        pids.append(int(subprocess.run([sys.executable, "-c", orphan, *nap], stdout=subprocess.PIPE).stdout))
        CALLS.with_name("pids").write_text(" ".join(map(str, pids)))
        if CALLS.with_name("hang").exists():
            time.sleep(60)
        return {"case": "leaves"}
    return [Case("before", lambda: called("before")), Case("leaves", leave)]


def meet(own, other):
    CALLS.with_name(own).touch()
    while not CALLS.with_name(other).exists():  # comes if the other row runs at the same time
        time.sleep(0.05)
    return called(own)


def first(device):
    return [Case("meets", lambda: meet("here", "there"))]


def second(device):
    return [Case("meets", lambda: meet("there", "here"))]



def hanging(device):
    def hang():
        called("hangs")
        if CALLS.with_name("hang").exists():
            CALLS.with_name("pid").write_text(str(os.getpid()))
            time.sleep(60)
        return {"case": "hangs"}
    return [Case("before", lambda: called("before")), Case("hangs", hang), Case("after", lambda: called("after"))]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with cases that go well, fail, die and hang, which processes of a session can import."""
    (tmp_path / "drawn_cases.py").write_text(CASES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(session, "LEAST_S", 0.1)
    return tmp_path


def row_of(function: str, part: Part = "alone", minutes: float = 1) -> ScheduledRow:
    return ScheduledRow(function, f"Row {function}", part, minutes, cases=f"drawn_cases:{function}")


LIMIT_MINUTES = 4 / 60
"""Enough for the start of a process on a busy machine."""


def outcomes_of(folder: Path, row: str) -> dict[str, str]:
    return {name: each["outcome"] for name, each in outcomes(folder / "out" / "rows" / f"{row}.jsonl").items()}


def calls(folder: Path, name: str) -> int:
    return (folder / "calls").read_text().split().count(name)


def states(folder: Path) -> dict[str, str]:
    return {name: line["state"] for name, line in last_states(folder / "out").items()}


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_limits_of_all_rows_fit_nine_minutes() -> None:
    assert sum(max(row.minutes for row in group) for group in groups(ROWS)) + START_MINUTES <= MINUTES == 9


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_names_tests_or_a_function_that_exist(row: ScheduledRow) -> None:
    assert bool(row.tests) != bool(row.cases)
    assert all((ROOT / path).exists() for path in (*row.tests, *row.dry_tests))
    assert set(row.needs) <= NEEDS.keys()
    if row.cases:
        module, _, name = row.cases.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("function", "bad"), [("failing", "fails"), ("killed", "dies")])
def test_failed_case_leaves_the_others_and_their_results(folder: Path, function: str, bad: str) -> None:
    assert not run_session([row_of(function), row_of("good")], "cuda:0", folder / "out", minutes=1)
    assert outcomes_of(folder, function) == {"before": "passed", bad: "failed", "after": "passed"}
    assert states(folder) == {function: "failed", "good": "finished"}
    assert calls(folder, bad) == 1


@pytest.mark.slow
def test_hanging_row_ends_at_its_limit_and_others_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hang").touch()
    short = row_of("hanging", minutes=LIMIT_MINUTES)
    assert run_session([short, row_of("good")], "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"hanging": "stopped", "good": "finished"}
    assert outcomes_of(folder, "hanging") == {"before": "passed"}
    assert calls(folder, "hangs") == 2  # once more after all others
    run_session([row_of("hanging")], "cuda:0", folder / "out", minutes=1)
    assert outcomes_of(folder, "hanging") == {"before": "passed", "hangs": "failed", "after": "passed"}
    assert calls(folder, "hangs") == 2


@pytest.mark.slow
def test_second_start_measures_only_what_is_left(folder: Path) -> None:
    (folder / "hang").touch()
    short = row_of("hanging", minutes=60)
    run_session([row_of("good"), short], "cuda:0", folder / "out", minutes=2 * LIMIT_MINUTES)
    (folder / "hang").unlink()
    assert states(folder) == {"good": "finished", "hanging": "stopped"}
    assert run_session([row_of("good"), short], "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"good": "finished", "hanging": "finished"}
    assert [calls(folder, name) for name in ("one", "two", "before", "hangs", "after")] == [1, 1, 1, 2, 1]


@pytest.mark.slow
def test_rows_that_need_the_card_alone_never_overlap(folder: Path) -> None:
    run_session([row_of("first"), row_of("second")], "cuda:0", folder / "out", minutes=LIMIT_MINUTES)
    assert states(folder) == {"first": "stopped"}
    assert (folder / "here").exists()
    assert not (folder / "there").exists()


@pytest.mark.slow
@pytest.mark.parametrize("hangs", [False, True], ids=["row ends", "limit ends it"])
def test_row_is_killed_with_all_that_it_started(folder: Path, hangs: bool) -> None:
    """Also those that have left its process group, and those whose parent has ended."""
    if hangs:
        (folder / "hang").touch()
    run_session([row_of("leaving", minutes=LIMIT_MINUTES)], "cuda:0", folder / "out", minutes=LIMIT_MINUTES)
    pids = [int(word) for word in (folder / "pids").read_text().split()]
    assert len(set(pids)) == 2
    assert [pid for pid in pids if is_running(pid)] == []
    assert states(folder) == {"leaving": "stopped" if hangs else "finished"}


@pytest.mark.slow
def test_killed_session_leaves_no_process_and_its_results(folder: Path) -> None:
    (folder / "hang").touch()
    program = (
        "import sys; from pathlib import Path; from tests.gpu.session import run_session; "
        "from tests.gpu.schedule import ScheduledRow; "
        "row = ScheduledRow('hanging', 'Row', 'alone', 1, cases='drawn_cases:hanging'); "
        "run_session([row], 'cuda:0', Path(sys.argv[1]), 1)"
    )
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}"}
    process = subprocess.Popen([sys.executable, "-c", program, str(folder / "out")], cwd=ROOT, env=environment)
    wait_for(lambda: (folder / "pid").exists(), process=process)
    pid = int((folder / "pid").read_text())
    assert is_running(pid)
    process.kill()
    process.wait()
    wait_for(lambda: not is_running(pid), timeout_s=20)
    assert outcomes_of(folder, "hanging") == {"before": "passed"}
    assert "| not ended | 1 | 0 | 0 |" in page(folder / "out", [row_of("hanging")])


def test_page_is_made_from_partial_files_alone(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    lines = [
        {"machine": "a card, torch 2.11"},
        {"row": "tests", "state": "failed", "reason": "1 of 3 failed", "seconds": 90.0},
        {"row": "ranks", "state": "failed", "reason": "exit 3: no such module", "seconds": 2.0},
    ]
    (tmp_path / "session.jsonl").write_text("\n".join(map(json.dumps, lines)) + '\n{"row": "ste')
    tests = [
        {"case": "t::one", "outcome": "passed"},
        {"case": "t::two", "outcome": "failed", "reason": "1 is not 2"},
        {"case": "t::three", "outcome": "skipped", "reason": "needs two cards"},
    ]
    (tmp_path / "rows" / "tests.jsonl").write_text("\n".join(map(json.dumps, tests)))
    measured = [{"case": "a", "began": 1.0}, {"case": "a", "outcome": "passed", "row": {"mode": "single", "ms": 2.5}}]
    (tmp_path / "rows" / "step.jsonl").write_text("\n".join(map(json.dumps, measured)) + '\n{"case": "b", "out')
    text = page(tmp_path)
    assert "a card, torch 2.11" in text
    assert "| tests | side by side | failed | 1 | 1 | 1 | 1.5 | 3 |" in text
    assert "| step | alone | not ended | 1 | 0 | 0 |" in text
    assert "| plan | side by side | not begun |" in text
    names = ["- tests: `t::two`: 1 is not 2", "- ranks: exit 3: no such module", "| row | part |"]
    assert sorted(names, key=text.index) == [names[1], names[0], names[2]], "failures first, in the order of the rows"
    assert "- 1: needs two cards" in text
    assert "| single | 2.5 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_machine_without_a_gpu_is_told_the_next_move(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert session.main(["--out", str(tmp_path)]) == 2
    assert "--dry" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_dry_session_ends_without_a_failure(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu.session", "--dry", "--minutes", "28", "--out", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    ended = {name: line["state"] for name, line in last_states(tmp_path).items()}
    assert ended == {row.name: "finished" if row.has_dry_form else "skipped" for row in ROWS}
    found = {row.name: outcomes(tmp_path / "rows" / f"{row.name}.jsonl") for row in ROWS if row.has_dry_form}
    assert [name for name, each in found.items() if not any(o["outcome"] == "passed" for o in each.values())] == []
