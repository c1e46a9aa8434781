"""A session on one card: python -m tests.gpu.session --minutes 45 --out DIR [--dry] [--only ROW ...].

Runs the rows of `tests.gpu.schedule` in order of worth, each as a process with a limit of its own. Results are files in
DIR, written as they come; `RESULTS.md` is made anew from them after every row. The same command continues a session
that was stopped: rows that are done are left out, and so are the cases of the other rows that have a result.
--dry runs every row in a form that needs no card, with small shapes: it tries the session itself, and its figures say
nothing about a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from segapp.parallel.launch import signal_when_parent_dies
from tests.gpu.cases import DONE_VARIABLE, RESULTS_VARIABLE, add_line, outcomes, read_lines
from tests.gpu.report import SESSION, last_states, write_page
from tests.gpu.schedule import DRY_LIMIT_S, MINUTES, ROWS, ScheduledRow, missing
from tests.support import ROOT

State = Literal["finished", "failed", "stopped", "skipped"]

OUT_VARIABLE = "SEGAPP_GPU_OUT"
"""The folder of the session, for rows that leave more than lines there."""

DEVICE_VARIABLE = "SEGAPP_GPU_TESTS_ON"
"""The device of the tests in tests/gpu."""

GRACE_S = 10.0
"""Between the interrupt, after which pytest still writes its XML, and the kill."""

LEAST_S = 5.0
"""Less time than this is no use to a row."""

NO_TESTS_LEFT = 5
"""Exit code of pytest if it ran no test: all had a result already."""


@dataclass(frozen=True)
class Ended:
    """The end of a row's process: its exit code; None if its limit ended it."""

    code: int | None


def run_session(
    rows: Sequence[ScheduledRow], device: str, out: Path, minutes: float, machine: str = "unknown machine"
) -> bool:
    """Run the rows that are not done; return True if no row has failed.

    A row that its own limit stopped runs on after all others, in the time that is left.
    """
    rows_folder(out).mkdir(parents=True, exist_ok=True)
    add_line(out / SESSION, machine=machine, minutes=minutes, device=device)
    end = time.monotonic() + 60 * minutes
    try:
        for row in (*rows, *rows):
            state = last_states(out).get(row.name, {}).get("state")
            if state in ("finished", "failed"):
                continue
            if reason := missing(row, device):
                if state != "skipped":
                    _note(out, row, "skipped", reason)
                continue
            limit_s = DRY_LIMIT_S if device == "cpu" else 60 * row.minutes
            left_s = min(limit_s, end - time.monotonic())
            if left_s < LEAST_S:
                continue
            run_row(row, device, out, left_s)
            write_page(out)
    finally:
        write_page(out)
    return all(state["state"] != "failed" for state in last_states(out).values())


def rows_folder(out: Path) -> Path:
    """Return the folder of the rows' files."""
    return out / "rows"


def run_row(row: ScheduledRow, device: str, out: Path, limit_s: float) -> None:
    """Run a row until it is done or its time is over, and note how it ended."""
    results = rows_folder(out) / f"{row.name}.jsonl"
    done = results.with_suffix(".done")
    _note_hanging_cases(results)
    began, end = time.monotonic(), time.monotonic() + limit_s
    print(f"{row.name}: {row.title} ({limit_s:.0f} s at most)", flush=True)
    try:
        while True:
            before = len(outcomes(results))
            done.write_text("\n".join(outcomes(results)))
            process = _run_process(row, device, out, results, end - time.monotonic())
            _note_crashed_case(results, process)
            is_further = len(outcomes(results)) > before
            if process.code in (None, 0) or row.tests or not is_further or end - time.monotonic() < LEAST_S:
                break
    except BaseException:
        _note(out, row, "stopped", "the session was stopped", began)
        raise
    _note(out, row, *_verdict(row, results, process, is_further), began)


def _verdict(row: ScheduledRow, results: Path, process: Ended, is_further: bool) -> tuple[State, str]:
    found = outcomes(results)
    failed = [name for name, outcome in found.items() if outcome["outcome"] == "failed"]
    if process.code is None:
        return "stopped", "its time is over"
    is_good_end = process.code == 0 or (bool(row.tests) and process.code == NO_TESTS_LEFT and bool(found))
    if failed:
        is_whole = is_good_end or bool(row.tests)
        return "failed", f"{len(failed)} of {len(found)} failed" + ("" if is_whole else f", exit {process.code}")
    if is_good_end:
        return "finished", ""
    last = _last_line(results.with_suffix(".log"))
    return "failed", f"exit {process.code}: {last}"


def _run_process(row: ScheduledRow, device: str, out: Path, results: Path, limit_s: float) -> Ended:
    """Run the row's process in a group of its own; its lines go to the row's log."""
    environment = {
        **os.environ,
        DEVICE_VARIABLE: device,
        RESULTS_VARIABLE: str(results),
        DONE_VARIABLE: str(results.with_suffix(".done")),
        OUT_VARIABLE: str(out),
        # Programs that the rows start elsewhere find the project, which need not be installed.
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # before the first matrix product of a process
        **({"OMP_NUM_THREADS": "1"} if device == "cpu" else {}),
    }
    with results.with_suffix(".log").open("ab") as log:
        process = subprocess.Popen(
            row.command(device, results),
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_prepare_process,
        )
        with _ended(process):
            try:
                return Ended(process.wait(limit_s))
            except subprocess.TimeoutExpired:
                return Ended(None)


def _prepare_process() -> None:
    """Let the process of a row end with the session, and take interrupts where a shell lets the session ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_when_parent_dies(signal.SIGINT)


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Leave no process of the row's group behind: interrupted first, then killed."""
    try:
        yield
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _note_crashed_case(results: Path, process: Ended) -> None:
    """Note the case in which a process ended without a word, so that it is not measured again."""
    lines = read_lines(results)
    if process.code and lines and "began" in lines[-1]:
        add_line(results, case=lines[-1]["case"], outcome="failed", reason=f"the process ended with {process.code}")


def _note_hanging_cases(results: Path) -> None:
    """Note the cases that two starts began and never ended: a third would hang in them too."""
    begun = Counter(line["case"] for line in read_lines(results) if "began" in line)
    for name in sorted(begun.keys() - outcomes(results).keys()):
        if begun[name] > 1:
            add_line(results, case=name, outcome="failed", reason="began twice, and never ended in the row's time")


def _note(out: Path, row: ScheduledRow, state: State, reason: str, began: float | None = None) -> None:
    seconds = 0.0 if began is None else time.monotonic() - began
    add_line(out / SESSION, row=row.name, state=state, reason=reason, seconds=seconds)
    print(f"{row.name}: {state}{f': {reason}' if reason else ''} ({seconds:.0f} s)", flush=True)


def _last_line(path: Path) -> str:
    return path.read_text(errors="replace").strip().rpartition("\n")[2] if path.exists() else ""


def repeat(row: str, out: Path) -> None:
    """Let a row run again as if it never had: its files get another name."""
    number = len(list(rows_folder(out).glob(f"{row}.jsonl*")))
    for path in rows_folder(out).glob(f"{row}.*"):
        if path.suffix in (".jsonl", ".xml", ".log", ".done"):
            path.rename(path.with_name(f"{path.name}.{number}"))
    add_line(out / SESSION, row=row, state="repeated", reason="", seconds=0.0)


def describe_machine(device: str) -> str:
    """Return a line that says what the session ran on."""
    facts = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if torch.device(device).type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = _output(query).partition("\n")[0] if shutil.which(query[0]) else ""
        facts = [torch.cuda.get_device_name(device), f"driver {driver or 'unknown'}", *facts]
    else:
        facts = ["CPU: a try of the session, no figures of a GPU", *facts]
    commit = _output(["git", "rev-parse", "--short", "HEAD"]) if shutil.which("git") else ""
    return ", ".join([*facts, f"commit {commit or 'unknown'}", datetime.date.today().isoformat()])


def _output(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()


def _interrupted(_signal: int, _frame: Any) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a session; return 1 if a row failed, 2 if there is no such device, 130 after a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all rows together")
    parser.add_argument("--out", type=Path, required=True, help="the folder of the results; an old one is continued")
    parser.add_argument("--dry", action="store_true", help="run on the CPU, with small shapes")
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--only", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", help="these rows")
    parser.add_argument("--again", nargs="+", choices=[row.name for row in ROWS], metavar="ROW", default=[])
    options = parser.parse_args(arguments)
    device = "cpu" if options.dry else options.device
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible: try the session itself with --dry", file=sys.stderr)
        return 2
    out = options.out.resolve()
    for row in options.again:
        repeat(row, out)
    rows = [row for row in ROWS if options.only is None or row.name in options.only]
    signal.signal(signal.SIGTERM, _interrupted)
    try:
        is_good = run_session(rows, device, out, options.minutes, describe_machine(device))
    except KeyboardInterrupt:
        return 130
    print(f"{out / 'RESULTS.md'}")
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
