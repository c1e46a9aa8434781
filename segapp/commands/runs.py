"""`segapp ls`, `status` and `ckpt`: the state of runs and checkpoints as aligned lines or JSON. No torch."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segapp.errors import CheckpointError
from segapp.run.checkpoints import CheckpointFolder, CheckpointStatus
from segapp.run.folder import find_run, is_sweep
from segapp.run.words import aligned, duration, printable
from segapp.scores import NOT_FINITE, loss_text, of_classes, score_text, with_count
from segapp.view.summary import RunSummary, list_runs, summarize

MAX_REASON_CHARS = 100
"""Maximum length of a reason in `segapp ls`; `segapp status RUN` shows all of it."""


def print_runs(root: Path, *, as_json: bool) -> None:
    """Print one line per run in a folder or a sweep, which may be named, the last started or resumed first."""
    summaries = list_runs(Path("runs") / root if is_sweep(Path("runs") / root) else root)
    if as_json:
        print(json.dumps([asdict(summary) for summary in summaries], indent=2))
        return
    if not summaries:
        print(f"no runs in {printable(str(root))}: segapp train starts one")
        return
    header = ("RUN", "STATE", "EPOCH", "STEP", "EPOCH LOSS", "MIOU", "BEST", "AGE", "")
    print("\n".join(aligned([header, *map(_row, summaries)])))


def _row(summary: RunSummary) -> tuple[str, ...]:
    return (
        summary.name,
        summary.state,
        _progress(summary),
        "-" if summary.step is None else f"{summary.step}/{summary.steps}" if summary.steps else str(summary.step),
        loss_text(summary.loss, is_known=summary.loss_epoch is not None),
        with_count(score_text(summary.miou), summary.num_scored, summary.num_classes),
        with_count(score_text(summary.best_miou), summary.best_num_scored, summary.num_classes),
        duration(summary.age_s),
        _failure(summary),
    )


def _failure(summary: RunSummary) -> str:
    """Return why a run failed, cut to the width that is left; empty for other runs."""
    reason = (summary.reason or "") if summary.state == "failed" else ""
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 3]}..."


def _progress(summary: RunSummary) -> str:
    return "-" if summary.epoch is None else f"{summary.epoch}/{summary.epochs or '?'}"


def print_status(run: str, *, as_json: bool) -> None:
    """Print the state and progress of a run."""
    facts = asdict(summarize(find_run(run).path))
    if as_json:
        print(json.dumps(facts, indent=2))
        return
    known = {**facts}
    for key, epoch in (("loss", "loss_epoch"), ("val_loss", "val_epoch")):
        if facts[key] is None and facts[epoch] is not None:
            known[key] = NOT_FINITE
    within = ("loss_epoch", "num_scored", "best_num_scored")  # these are part of other lines
    shown = {key: value for key, value in known.items() if value not in (None, [], {}) and key not in within}
    devices = shown.pop("devices", [])
    scores = shown.pop("scores", {})
    oom = shown.pop("last_oom", None)
    rows = [(key, _text(key, value) + _made_of(key, facts)) for key, value in shown.items()]
    rows += [(key, _text(key, value)) for key, value in scores.items() if value is not None and key not in facts]
    if oom is not None:
        rows.append(("last_oom", f"{oom['device']} in {oom['phase']} after step {oom['step']}: {oom['action']}"))
        rows.append(("report", str(oom["path"] or "-")))
    print("\n".join(aligned([*rows, *(("device" if i == 0 else "", _device(d)) for i, d in enumerate(devices))])))


def _made_of(key: str, facts: Mapping[str, Any]) -> str:
    """Return the source of a score in `segapp status`; empty for other values."""
    if key == "loss":
        return f" (training, mean of epoch {facts['loss_epoch']})"
    num_scored = {"miou": facts["num_scored"], "best_miou": facts["best_num_scored"]}.get(key)
    return "" if num_scored is None else f" over {of_classes(num_scored, facts['num_classes'] or num_scored)}"


def _device(facts: Mapping[str, Any]) -> str:
    """Return one line: `node1 cuda:0  14.1 of 22.0 GiB used, peak 15.2, in forward, 96 % busy, 71 degrees`."""
    used, total = (None if facts[key] is None else facts[key] / 1024 for key in ("used_mib", "total_mib"))
    words = ["n/a used" if used is None else f"{used:.1f}{'' if total is None else f' of {total:.1f}'} GiB used"]
    if facts["peak_mib"] is not None:
        words.append(f"peak {facts['peak_mib'] / 1024:.1f}{' in ' + facts['phase'] if facts['phase'] else ''}")
    if facts["utilization"] is not None:
        words.append(f"{facts['utilization']:.0%} busy")
    if facts["temperature"] is not None:
        words.append(f"{facts['temperature']:.0f} degrees")
    where = f"{printable(facts['machine'])} " if facts["machine"] else ""
    return f"{where}{facts['device'] or facts['uuid'] or '?'}  {', '.join(words)}"


def print_checkpoints(run: str, *, as_json: bool, hashes: bool) -> int:
    """Print the committed checkpoints, newest first; return 4 if one is damaged; `hashes` reads every byte."""
    rows = CheckpointFolder(find_run(run).checkpoints).verify(hashes=hashes)
    if as_json:
        facts = [
            {
                **row.entry.model_dump(),
                "epoch": row.entry.last_epoch,
                "next_epoch": row.entry.epoch,
                "names": list(row.names),
                "problem": row.problem,
            }
            for row in rows
        ]
        print(json.dumps(facts, indent=2))
    elif not rows:
        print("no committed checkpoint")
    else:
        header = ("NAMES", "EPOCH", "STEP", "METRIC", "MIB", "STATE")
        print("\n".join(aligned([header, *map(_checkpoint_row, rows)])))
    return CheckpointError.exit_code if any(row.problem for row in rows) else 0


def _checkpoint_row(row: CheckpointStatus) -> tuple[str, ...]:
    entry = row.entry
    size_mib = f"{entry.size_bytes / 2**20:.1f}"
    names = " ".join(row.names) or f"objects/{entry.object}"
    return (names, str(entry.last_epoch), str(entry.step), score_text(entry.metric), size_mib, row.problem or "ok")


def _text(key: str, value: Any) -> str:
    if key == "began_s":
        return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(value))
    if key.endswith("_s") and isinstance(value, (int, float)) and not key.endswith("per_s"):
        return duration(value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)
