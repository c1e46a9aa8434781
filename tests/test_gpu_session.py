"""The session on one card: its schedule, its stops and second starts, and the page from partial results."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu import session, wheels
from tests.gpu.cases import DONE_VARIABLE, RESULTS_VARIABLE, outcomes
from tests.gpu.report import page
from tests.gpu.sanitized import sanitized
from tests.gpu.schedule import (
    MINUTES,
    NEEDS,
    ROWS,
    START_MINUTES,
    Part,
    ScheduledRow,
    groups,
    missing,
    sanitizer_program,
)
from tests.gpu.session import last_states, run_session
from tests.support import ROOT
from tests.support.live_runs import wait_for
from tests.support.rank_steps import let_ranks_share_a_gpu

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


def unable(device):
    def refuse():
        raise NotPossible("liger_kernel is not installed")
    return [Case("liger", refuse), *good(device)]


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


def allocator(device):
    return [Case("environment", lambda: {name: value for name, value in os.environ.items() if "ALLOC_CONF" in name})]


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


# --- the schedule ---


def test_limits_of_all_rows_fit_nine_minutes() -> None:
    assert sum(max(row.minutes for row in group) for group in groups(ROWS)) + START_MINUTES <= MINUTES == 9


def test_figures_that_need_the_card_alone_come_first() -> None:
    *alone, beside = [{row.name for row in group} for group in groups(ROWS)]
    assert alone == [{"step"}, {"loss"}, {"small-network"}]
    assert beside == {"tests", "ranks", "ranks-nccl", "plan", "sanitizer"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_row_names_tests_or_a_function_that_exist(row: ScheduledRow) -> None:
    assert bool(row.tests) != bool(row.cases)
    assert all((ROOT / path).exists() for path in (*row.tests, *row.dry_tests))
    assert set(row.needs) <= NEEDS.keys()
    if row.cases:
        module, _, name = row.cases.partition(":")
        tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_row_names_are_unique_and_compilations_are_spread() -> None:
    assert len({row.name for row in ROWS}) == len(ROWS)
    row = next(row for row in ROWS if row.name == "tests")
    words = " ".join(row.command("cuda:0", Path("out/rows/tests.jsonl")))
    for option in ("-n 10", "--dist worksteal", "--maxfail 30", "-m gpu", "-p no:benchmark", "tests/gpu"):
        assert option in words


def test_sanitizer_of_the_path_is_taken_else_its_row_is_skipped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    row = next(row for row in ROWS if "compute-sanitizer" in row.needs)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "compute-sanitizer is not on the PATH" in missing(row, "cuda:0")
    assert missing(row, "cpu") is None
    (tmp_path / "compute-sanitizer").touch(0o755)
    assert missing(row, "cuda:0") is None
    assert sanitizer_program() == tmp_path / "compute-sanitizer"
    assert missing(next(row for row in ROWS if not row.has_dry_form), "cpu") is not None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
    ],
    ids=["of trainings", "of the caller"],
)
def test_rows_have_the_allocator_of_trainings(
    own: dict[str, str], expected: dict[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(sys, "platform", "linux")
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert run_session([row_of("allocator")], "cpu", folder / "out", minutes=1)
    (seen,) = outcomes(folder / "out" / "rows" / "allocator.jsonl").values()
    assert seen["row"] == expected


# --- failures and stops ---


@pytest.mark.parametrize(("function", "bad"), [("failing", "fails"), ("killed", "dies")])
def test_failed_case_leaves_the_others_and_their_results(folder: Path, function: str, bad: str) -> None:
    assert not run_session([row_of(function), row_of("good")], "cuda:0", folder / "out", minutes=1)
    assert outcomes_of(folder, function) == {"before": "passed", bad: "failed", "after": "passed"}
    assert states(folder) == {function: "failed", "good": "finished"}
    assert calls(folder, bad) == 1


def test_reason_of_a_failure_is_its_first_line(folder: Path) -> None:
    rows = [row_of("failing"), row_of("killed")]
    run_session(rows, "cuda:0", folder / "out", minutes=1)
    text = page(folder / "out", rows)
    assert "ValueError: 7 is not 8" in text
    assert "second line" not in text
    assert "the process ended with -9" in text


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


def test_second_start_measures_only_what_is_left(folder: Path) -> None:
    (folder / "hang").touch()
    short = row_of("hanging", minutes=60)
    run_session([row_of("good"), short], "cuda:0", folder / "out", minutes=2 * LIMIT_MINUTES)
    (folder / "hang").unlink()
    assert states(folder) == {"good": "finished", "hanging": "stopped"}
    assert run_session([row_of("good"), short], "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"good": "finished", "hanging": "finished"}
    assert [calls(folder, name) for name in ("one", "two", "before", "hangs", "after")] == [1, 1, 1, 2, 1]


def test_rows_side_by_side_run_at_the_same_time(folder: Path) -> None:
    rows = [row_of("first", "side by side"), row_of("second", "side by side")]
    assert run_session(rows, "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"first": "finished", "second": "finished"}


def test_rows_that_need_the_card_alone_never_overlap(folder: Path) -> None:
    run_session([row_of("first"), row_of("second")], "cuda:0", folder / "out", minutes=LIMIT_MINUTES)
    assert states(folder) == {"first": "stopped"}
    assert (folder / "here").exists()
    assert not (folder / "there").exists()


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


def test_archive_is_written_while_a_row_runs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hang").touch()
    out, saved = folder / "out", session.save
    found: list[tuple[list[str], str]] = []

    def save_and_look(place: Path) -> None:
        saved(place)
        shutil.rmtree(folder / "unpacked", ignore_errors=True)
        with tarfile.open(out / session.ARCHIVE) as archive:
            archive.extractall(folder / "unpacked", filter="data")
        results = outcomes(folder / "unpacked" / "rows" / "hanging.jsonl")
        assert (folder / "unpacked" / "RESULTS.md").exists()
        found.append((list(results), page(folder / "unpacked", [row_of("hanging")])))

    monkeypatch.setattr(session, "SAVE_S", 0.5)
    monkeypatch.setattr(session, "save", save_and_look)
    began = time.monotonic()
    run_session([row_of("hanging", minutes=LIMIT_MINUTES)], "cuda:0", out, minutes=LIMIT_MINUTES)
    assert len(found) >= 0.5 * (time.monotonic() - began) > 2
    results, text = found[-3]
    assert results == ["before"]
    assert "- hanging: `hangs`" in text.partition("Began, and have not ended")[2]
    assert "| not ended | 1 | 0 | 0 |" in text


def test_stopped_session_notes_the_row_and_writes_the_page(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    (folder / "hang").touch()
    monkeypatch.setattr(session.RunningRow, "look_after", stop)
    with pytest.raises(KeyboardInterrupt):
        run_session([row_of("hanging")], "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"hanging": "stopped"}
    assert "| hanging | alone | stopped |" in page(folder / "out", [row_of("hanging")])
    assert (folder / "out" / session.ARCHIVE).exists()


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


def test_time_that_is_over_leaves_later_rows_for_the_next_start(folder: Path) -> None:
    assert run_session([row_of("good")], "cuda:0", folder / "out", minutes=0)
    assert states(folder) == {}
    assert run_session([row_of("good")], "cuda:0", folder / "out", minutes=1)
    assert states(folder) == {"good": "finished"}


def test_case_that_is_not_possible_is_skipped_with_its_reason(folder: Path) -> None:
    assert run_session([row_of("unable")], "cuda:0", folder / "out", minutes=1)
    assert outcomes_of(folder, "unable") == {"liger": "skipped", "one": "passed", "two": "passed"}


@pytest.mark.slow
def test_plugin_writes_each_test_and_leaves_done_ones_out(tmp_path: Path) -> None:
    (tmp_path / "test_drawn.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_absent(): pytest.skip('no card')\n"
    )
    results, done = tmp_path / "row.jsonl", tmp_path / "row.done"
    words = ["-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "tests.gpu.each_test", "test_drawn.py"]
    own = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}  # of this worker
    environment = {**own, "PYTHONPATH": str(ROOT), RESULTS_VARIABLE: str(results), DONE_VARIABLE: str(done)}
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "pytest", *words], cwd=tmp_path, env=environment, capture_output=True)
        found = {name.partition("::")[2]: each for name, each in outcomes(results).items()}
        assert {name: each["outcome"] for name, each in found.items()} == {
            "test_good": "passed",
            "test_bad": "failed",
            "test_absent": "skipped",
        }
        assert len(results.read_text().splitlines()) == 6  # each began and ended once
        done.write_text("\n".join(outcomes(results)))
    assert found["test_bad"]["reason"] == "assert 1 == 2"
    assert "no card" in found["test_absent"]["reason"]


# --- the page ---


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
    assert "| tests | side by side | failed | 1 | 1 | 1 | 1.5 | 4 |" in text
    assert "| step | alone | not ended | 1 | 0 | 0 |" in text
    assert "| plan | side by side | not begun |" in text
    names = ["- ranks: exit 3: no such module", "- tests: `t::two`: 1 is not 2", "| row | part |"]
    assert sorted(names, key=text.index) == [names[1], names[0], names[2]], "failures first, in the order of the rows"
    assert "- 1: needs two cards" in text
    assert "| single | 2.5 |" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a CUDA device")
def test_machine_without_a_gpu_is_told_the_next_move(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert session.main(["--out", str(tmp_path)]) == 2
    assert "--dry" in capsys.readouterr().err


# --- what the machine brings ---


def test_wheels_are_for_python_312_and_hold_no_torch(tmp_path: Path) -> None:
    whole, bare, built = wheels.commands(tmp_path)
    names = [wheels.name_of(word) for command in (whole, bare, built) for word in command[3:] if word[0] != "-"]
    assert "torch" not in names
    assert {"torchvision", "timm", "liger-kernel", "nvidia-cuda-sanitizer-api"} <= set(names)
    assert {"pytest", "pytest-xdist", "albumentations", "gputil"} <= set(names)
    assert "--no-deps" in bare
    assert "--no-deps" not in whole
    for command in (whole, bare):
        assert command[command.index("--python-version") + 1] == "3.12"
    assert not [word for command in (whole, bare, built) for word in command if "://" in word or "index" in word]


def test_lean_wheels_leave_out_the_image_and_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"opencv_python_headless-5.0-cp37.whl": 50, "GPUtil-1.4-py3.whl": 1, "pydantic_core-2.5-cp312.whl": 23}
    for name, mib in sizes.items():
        with (tmp_path / name).open("wb") as file:
            file.truncate(mib * 2**20)
    assert wheels.finish(tmp_path, is_lean=True) == 0
    assert capsys.readouterr().out.splitlines() == [*sorted(sizes)[:1], *sorted(sizes)[2:], "2 wheels, 24.0 MiB"]
    (tmp_path / "new-1.whl").write_bytes(bytes(2**21))
    assert wheels.finish(tmp_path, is_lean=True) == 1
    assert "add what the image has to IN_IMAGES" in capsys.readouterr().err


def test_wheels_that_the_project_needs_are_not_in_the_image() -> None:
    needed = {"albumentations", "gputil", "pydantic", "segmentation-models-pytorch", "simplejpeg", "textual"}
    assert not needed & wheels.IN_IMAGES
    assert {"torchvision", "numpy", "scipy", "timm", "grpcio", "hf-xet"} <= wheels.IN_IMAGES


def test_sanitizer_watches_the_kernels_of_the_loss(tmp_path: Path) -> None:
    program = tmp_path / "compute-sanitizer"
    program.touch(0o644)
    command = sanitized("racecheck", ["python", "-m", "x"], program)
    assert command[:3] == [str(program), "--tool", "racecheck"]
    assert command[-3:] == ["python", "-m", "x"]
    watched = [word.partition("=")[2] for word in command if word.startswith("kernel_substring=")]
    source = (ROOT / "segapp/losses/fused/triton_kernels.py").read_text()
    assert watched
    assert all(f"def {name}(" in source for name in watched)
    assert os.access(program, os.X_OK)
    assert "--kernel-name" not in sanitized("initcheck", ["python"], program)


@pytest.mark.parametrize(("version", "name"), [((2, 30, 7), "NCCL_MULTI_RANK_GPU_ENABLE"), ((2, 28, 9), "NCCL_HOSTID")])
def test_nccl_ranks_share_a_card_as_its_version_can(
    version: tuple[int, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: version)
    values = []
    for rank in (0, 1):
        monkeypatch.setattr(os, "environ", {})
        let_ranks_share_a_gpu(rank)
        values.append(os.environ[name])
    assert (values[0] != values[1]) == (name == "NCCL_HOSTID")  # a host of its own for each rank


# --- the whole ---


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
