"""A session on one card: python -m tests.gpu.session --minutes 9 --out DIR [--dry] [--only ROW ...].

Runs the rows of `tests.gpu.schedule`, each in processes of its own with a limit, after which they are killed. Results
are files in DIR, written as they come. After every row, and every minute, `RESULTS.md` is made anew from them, and
`results.tar.gz` with all of them. The same command continues a session that was stopped: rows that are done are left
out, and so are the cases of the other rows that have a result.
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
import tarfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil
import torch

from segapp.assembly.devices import numerics
from segapp.memory.split_check import ALLOCATOR_VARIABLES
from segapp.parallel.launch import signal_when_parent_dies
from tests.gpu.cases import DONE_VARIABLE, RESULTS_VARIABLE, add_line, outcomes, starts_without_end
from tests.gpu.report import SESSION, last_states, write_page
from tests.gpu.schedule import DRY_LIMIT_S, MINUTES, ROWS, ScheduledRow, groups, missing
from tests.support import ROOT

State = Literal["finished", "failed", "stopped", "skipped"]

DEVICE_VARIABLE = "SEGAPP_GPU_TESTS_ON"
"""The device of the tests in tests/gpu."""

ARCHIVE = "results.tar.gz"

SAVE_S = 60.0
"""Between two archives."""

POLL_S = 0.1
"""Between two looks at the processes."""

KILL_S = 10.0
"""Longest wait for processes that were killed."""

LEAST_S = 5.0
"""Less time than this is no use to a row."""

NO_TESTS_LEFT = 5
"""Exit code of pytest if it ran no test: all had a result already."""


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
        for group in [*groups(rows), *groups(rows)]:
            run_side_by_side([row for row in group if _can_start(row, device, out)], device, out, end)
    finally:
        save(out)
    return all(state["state"] != "failed" for state in last_states(out).values())


def _can_start(row: ScheduledRow, device: str, out: Path) -> bool:
    state = last_states(out).get(row.name, {}).get("state")
    reason = missing(row, device)
    if reason and state != "skipped":
        _note(out, row, "skipped", reason)
    return reason is None and state not in ("finished", "failed")


def run_side_by_side(rows: Sequence[ScheduledRow], device: str, out: Path, end: float) -> None:
    """Run rows at the same time, each until it is done or its time is over, and note how each ended.

    Args:
        rows: the rows.
        device: of the session.
        out: the folder of the results.
        end: when the session ends, on the monotonic clock.
    """
    if end - time.monotonic() < LEAST_S:
        return
    running = [RunningRow(row, device, out, end) for row in rows]
    saved = time.monotonic()
    try:
        while running:
            time.sleep(POLL_S)
            still = [row for row in running if row.look_after()]
            if len(still) < len(running) or time.monotonic() - saved > SAVE_S:
                save(out)
                saved = time.monotonic()
            running = still
    finally:
        for row in running:
            row.stop()


def save(out: Path) -> None:
    """Make the page and the archive of all results anew."""
    write_page(out)
    new = out / f"{ARCHIVE}.new"
    with tarfile.open(new, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if not path.name.startswith(ARCHIVE):
                archive.add(path, path.name)
    new.replace(out / ARCHIVE)  # a stop leaves the last one


def rows_folder(out: Path) -> Path:
    """Return the folder of the rows' files."""
    return out / "rows"


class RunningRow:
    """A row whose process runs; after the failure of a case, another process takes the cases that are left.

    Args:
        row: the row.
        device: of the session.
        out: the folder of the results.
        end: when the session ends, on the monotonic clock.
    """

    def __init__(self, row: ScheduledRow, device: str, out: Path, end: float) -> None:
        self._row, self._device, self._out = row, device, out
        self._results = rows_folder(out) / f"{row.name}.jsonl"
        _note_hanging_cases(self._results)
        limit_s = DRY_LIMIT_S if device == "cpu" else 60 * row.minutes
        self._began = time.monotonic()
        self._end = min(end, self._began + limit_s)
        print(f"{row.name}: {row.title} ({self._end - self._began:.0f} s at most)", flush=True)
        self._process = self._start()

    def look_after(self) -> bool:
        """Return True while the row runs; its end is noted."""
        code = self._process.poll()
        now = time.monotonic()
        if code is None and now < self._end:
            return True
        kill_whole(self._process, self._results)
        if code is None:
            self._note_end("stopped", "its time is over")
            return False
        if self._row.cases and code:
            _note_crashed_case(self._results, code)
            is_further = len(outcomes(self._results)) > self._num_before
            if is_further and self._end - now > LEAST_S:
                self._process = self._start()
                return True
        self._note_end(*_verdict(self._row, self._results, code))
        return False

    def stop(self) -> None:
        """End the row because the session ends."""
        kill_whole(self._process, self._results)
        self._note_end("stopped", "the session was stopped")

    def _note_end(self, state: State, reason: str) -> None:
        _note(self._out, self._row, state, reason, time.monotonic() - self._began)

    def _start(self) -> subprocess.Popen[bytes]:
        """Start the row's process in a group of its own; its lines go to the row's log."""
        done = self._results.with_suffix(".done")
        names = list(outcomes(self._results))
        self._num_before = len(names)
        done.write_text("\n".join(names))
        environment = {
            **allocator_of_trainings(),
            **os.environ,
            DEVICE_VARIABLE: self._device,
            RESULTS_VARIABLE: str(self._results),
            DONE_VARIABLE: str(done),
            # Programs that the rows start elsewhere find the project, which need not be installed.
            "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
            "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # before the first matrix product of a process
            **({"OMP_NUM_THREADS": "1"} if self._device == "cpu" else {}),
        }
        with self._results.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                self._row.command(self._device, self._results),
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_prepare_process,
            )


def allocator_of_trainings() -> dict[str, str]:
    """Return the variables of torch's allocator in a training on this machine, which its plans expect.

    torch reads them at the first call of CUDA. A row that needs others sets them in its process before that.
    """
    with numerics(deterministic=False, tf32=True):
        return {name: os.environ[name] for name in ALLOCATOR_VARIABLES if name in os.environ}


def _prepare_process() -> None:
    """Let the process of a row end with the session, and take interrupts where a shell lets the session ignore them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal_when_parent_dies(signal.SIGINT)


def kill_whole(process: subprocess.Popen[bytes], results: Path) -> None:
    """Kill a row's process, its group, and every process that has left the group, such as ranks and their trainers.

    Those have the row's file of results in their environment, whoever is their parent now.
    """
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    deadline = time.monotonic() + KILL_S
    while (left := _processes_of(results)) and time.monotonic() < deadline:  # again: one may have forked meanwhile
        for each in left:
            with contextlib.suppress(psutil.Error):
                each.kill()
        psutil.wait_procs(left, timeout=1)


def _processes_of(results: Path) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # it has ended, or is another user's
            if process.environ().get(RESULTS_VARIABLE) == str(results):
                found.append(process)
    return found


def _verdict(row: ScheduledRow, results: Path, code: int) -> tuple[State, str]:
    found = outcomes(results)
    failed = [name for name, outcome in found.items() if outcome["outcome"] == "failed"]
    is_good_end = code == 0 or (bool(row.tests) and code == NO_TESTS_LEFT and bool(found))
    if failed:
        is_whole = is_good_end or bool(row.tests)
        return "failed", f"{len(failed)} of {len(found)} failed" + ("" if is_whole else f", exit {code}")
    if is_good_end:
        return "finished", ""
    return "failed", f"exit {code}: {_last_line(results.with_suffix('.log'))}"


def _note_crashed_case(results: Path, code: int) -> None:
    """Note the case in which a process ended without a word, so that it is not measured again."""
    for name in starts_without_end(results):
        add_line(results, case=name, outcome="failed", reason=f"the process ended with {code}")


def _note_hanging_cases(results: Path) -> None:
    """Note the cases that two starts began and never ended: a third would hang in them too."""
    for name, num_starts in starts_without_end(results).items():
        if num_starts > 1:
            add_line(results, case=name, outcome="failed", reason="began twice, and never ended in the row's time")


def _note(out: Path, row: ScheduledRow, state: State, reason: str, seconds: float = 0.0) -> None:
    add_line(out / SESSION, row=row.name, state=state, reason=reason, seconds=seconds)
    print(f"{row.name}: {state}{f': {reason}' if reason else ''} ({seconds:.0f} s)", flush=True)


def _last_line(path: Path) -> str:
    return path.read_text(errors="replace").strip().rpartition("\n")[2] if path.exists() else ""


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
    options = parser.parse_args(arguments)
    device = "cpu" if options.dry else options.device
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible: try the session itself with --dry", file=sys.stderr)
        return 2
    out = options.out.resolve()
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
