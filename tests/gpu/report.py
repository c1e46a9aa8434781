"""Figures of one machine as a markdown report: python -m tests.gpu.report [--device cuda:0] [--out FILE].

Each section runs in a process of its own, so that a crash or an out-of-memory error ends that section alone. A section
whose packages are missing is skipped and says so. With --device cpu the sections run on small shapes: a try of the
report itself, whose figures say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import json
import platform
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.support import ROOT

BUDGET_S = 520.0
"""Seconds for all sections together."""

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Section:
    """A table of the report: `function(device)` of a module returns its rows."""

    title: str
    module: str
    function: str

    @property
    def name(self) -> str:
        """The section's name on the command line."""
        return self.function.removesuffix("_figures")


SECTIONS = (
    Section("Loss against interpolate + cross_entropy", "tests.gpu.figures_loss", "loss_figures"),
    Section("Training step: single, dp, ddp", "tests.gpu.figures_training", "training_figures"),
    Section("Planned against measured peaks", "tests.gpu.figures_training", "plan_figures"),
    Section("Loader against device", "tests.gpu.figures_loader", "loader_figures"),
    Section("Evaluation", "tests.gpu.figures_training", "evaluation_figures"),
)


@dataclass(frozen=True)
class Outcome:
    """Rows of a section, or why it has none; `is_failure` if that is an error."""

    rows: Sequence[Row] = ()
    reason: str = ""
    is_failure: bool = False


def run_section(section: Section, device: str, timeout_s: float) -> Outcome:
    """Run a section in a process of its own."""
    if timeout_s <= 0:
        return Outcome(reason=f"skipped: the {BUDGET_S:.0f} s of the report are over")
    command = [sys.executable, "-m", "tests.gpu.report", "--device", device, "--section", section.name]
    try:
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return Outcome(reason=f"failed: not done within {timeout_s:.0f} s", is_failure=True)
    return read_outcome(result.returncode, result.stdout, result.stderr)


def read_outcome(returncode: int, stdout: str, stderr: str) -> Outcome:
    """Return the outcome that a section's process printed in its last line."""
    last = stdout.strip().rpartition("\n")[2]
    if returncode == 0 and last.startswith("{"):
        found = json.loads(last)
        return Outcome(found["rows"], found["reason"])
    error = stderr.strip().rpartition("\n")[2]
    return Outcome(reason=f"failed: exit {returncode}: {error}", is_failure=True)


def print_section(section: Section, device: str) -> None:
    """Print the outcome of a section as JSON; to be called in its process."""
    try:
        function = getattr(importlib.import_module(section.module), section.function)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("tests"):
            raise
        print(json.dumps({"rows": [], "reason": f"skipped: {error.name} is not installed"}))
        return
    print(json.dumps({"rows": function(device), "reason": ""}))


def table(rows: Sequence[Row]) -> str:
    """Return rows as a markdown table; columns in the order in which they first appear."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    lines = [columns, ["---"] * len(columns), *([shown(row.get(column)) for column in columns] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def shown(value: Any) -> str:
    """Return a cell: numbers with three significant digits, nothing for None."""
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return str(value).replace("|", "\\|")


def machine(device: str) -> str:
    """Return a line that says what the figures were measured on."""
    facts = [f"torch {torch.__version__}", f"Python {platform.python_version()}"]
    if torch.device(device).type == "cuda":
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip().partition("\n")[0]
        facts = [torch.cuda.get_device_name(device), f"driver {driver or 'unknown'}", *facts]
    else:
        facts = ["CPU: a try of the report, no figures of a GPU", *facts]
    commit = ["git", "rev-parse", "--short", "HEAD"]
    found = subprocess.run(commit, capture_output=True, text=True, cwd=ROOT, check=False).stdout.strip()
    return ", ".join([*facts, f"commit {found or 'unknown'}", datetime.date.today().isoformat()])


def report(device: str, sections: Sequence[Section] = SECTIONS, budget_s: float = BUDGET_S) -> tuple[str, bool]:
    """Return the report, and True if no section failed."""
    parts = ["# Figures of a GPU\n", machine(device) + "\n"]
    end, is_good = time.monotonic() + budget_s, True
    for section in sections:
        start = time.monotonic()
        outcome = run_section(section, device, end - start)
        is_good &= not outcome.is_failure
        parts.append(f"## {section.title}\n")
        parts.append((outcome.reason or table(outcome.rows)) + f"\n\n({time.monotonic() - start:.0f} s)\n")
        print(parts[-2], parts[-1], sep="\n", file=sys.stderr, flush=True)
    return "\n".join(parts), is_good


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the report; return 1 if a section failed, 2 if there is no such device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--out", type=Path, help="also write the report to this file")
    parser.add_argument("--section", choices=[section.name for section in SECTIONS], help="print one section as JSON")
    options = parser.parse_args(arguments)
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        print("error: no CUDA device is visible: try the report itself with --device cpu", file=sys.stderr)
        return 2
    if options.section:
        print_section(next(s for s in SECTIONS if s.name == options.section), options.device)
        return 0
    text, is_good = report(options.device)
    print(text)
    if options.out is not None:
        options.out.write_text(text)
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
