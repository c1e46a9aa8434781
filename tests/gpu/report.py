"""The page of a session, made from its result files alone: python -m tests.gpu.report DIR.

`tests.gpu.session` makes it after every row and every minute. After a stop that left it no time, this command makes it.
"""

from __future__ import annotations

import statistics
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.gpu.cases import outcomes, read_lines, starts_without_end
from tests.gpu.schedule import ROWS, ScheduledRow
from tests.support.plan_scores import failure_probability, median_relative_error, memory_conserved

SESSION = "session.jsonl"
"""The file with a line for each start of the session and for each end of a row."""

Row = Mapping[str, Any]


def last_states(out: Path) -> dict[str, dict[str, Any]]:
    """Return how each row ended the last time: `state`, `reason`, `seconds`."""
    return {line["row"]: line for line in read_lines(out / SESSION) if "row" in line}


def write_page(out: Path) -> None:
    """Write RESULTS.md into the folder of a session."""
    (out / "RESULTS.md").write_text(page(out))


def page(out: Path, rows: Sequence[ScheduledRow] = ROWS) -> str:
    """Return the page: the machine, what failed, a table of the rows, then what each row found."""
    lines = read_lines(out / SESSION)
    seconds: Counter[str] = Counter()
    for line in lines:
        if "row" in line:
            seconds[line["row"]] += line["seconds"]
    states = last_states(out)
    found = {row.name: outcomes(_results(out, row)) for row in rows}
    parts = ["# A session on one card"]
    parts += dict.fromkeys(line["machine"] for line in lines if "machine" in line)
    parts += _failures(rows, states, found)
    open_cases = [f"- {row.name}: `{name}`" for row in rows for name in starts_without_end(_results(out, row))]
    parts += ["Began, and have not ended:\n\n" + "\n".join(open_cases)] if open_cases else []
    parts.append(table([_summary(row, states.get(row.name), found[row.name], seconds[row.name]) for row in rows]))
    parts += [section for row in rows if (section := _section(row, found[row.name]))]
    return "\n\n".join(parts) + "\n"


def _results(out: Path, row: ScheduledRow) -> Path:
    return out / "rows" / f"{row.name}.jsonl"


def _failures(
    rows: Sequence[ScheduledRow], states: Mapping[str, Row], found: Mapping[str, Mapping[str, Row]]
) -> list[str]:
    """Return the names of all that failed; also of rows that failed as a whole."""
    lines = []
    for row in rows:
        failed = {name: each["reason"] for name, each in found[row.name].items() if each["outcome"] == "failed"}
        lines += [f"- {row.name}: `{name}`: {reason}" for name, reason in failed.items()]
        if not failed and states.get(row.name, {}).get("state") == "failed":
            lines.append(f"- {row.name}: {states[row.name]['reason']}")
    return ["Failed:\n\n" + "\n".join(lines)] if lines else []


def _summary(row: ScheduledRow, state: Row | None, found: Mapping[str, Row], seconds: float) -> Row:
    counts = Counter(outcome["outcome"] for outcome in found.values())
    ended = "not begun" if state is None and not found else "not ended" if state is None else state["state"]
    return {
        "row": row.name,
        "part": row.part,
        "state": ended,
        **{kind: counts[kind] for kind in ("passed", "failed", "skipped")},
        "minutes": round(seconds / 60, 1),
        "limit": row.minutes,
        "reason": None if state is None else state["reason"],
    }


def _section(row: ScheduledRow, found: Mapping[str, Row]) -> str:
    parts = [f"## {row.title}"]
    if rows := [outcome["row"] for outcome in found.values() if outcome.get("row")]:
        if row.name in METRICS:
            parts.append(METRICS[row.name](rows))
        parts.append(table(rows))
    parts += _skips(found)
    return "\n\n".join(parts) if len(parts) > 1 else ""


def _skips(found: Mapping[str, Row]) -> list[str]:
    counts = Counter(each["reason"] for each in found.values() if each["outcome"] == "skipped")
    return ["Skipped:\n\n" + "\n".join(f"- {number}: {reason}" for reason, number in counts.items())] if counts else []


def plan_metrics(rows: Sequence[Row]) -> str:
    """Return the metrics of xMem (https://arxiv.org/abs/2510.21048) over the rows that were measured.

    The median relative error of the peaks; the share of plans whose run then fails, with the memory that the plan
    allows and no more; the share of that memory that the run leaves unused; and the card's memory that plans leave to
    others.
    """
    peaks = [(row["planned MiB"], row["measured MiB"]) for row in rows if row.get("measured MiB")]
    if not peaks:
        return "No peak was measured: this machine has no card."
    fails = [row["fails in plan"] for row in rows if row.get("fails in plan") is not None]
    unused = [row["unused %"] for row in rows if row.get("unused %") is not None]
    given = [(row["device MiB"], row["allowed MiB"], row["fails in plan"]) for row in rows if row.get("allowed MiB")]
    lines = [f"- median relative error: {100 * median_relative_error(peaks):.1f} % of {len(peaks)} peaks"]
    if fails:
        share = 100 * failure_probability(fails)
        lines.append(f"- plans whose run then fails: {sum(fails)} of {len(fails)} ({share:.0f} %)")
    if unused:
        lines.append(f"- planned memory left unused, median: {statistics.median(unused):.1f} %")
    if given:
        lines.append(f"- memory left to others, mean: {memory_conserved(given) / 1024:.1f} GiB of a card")
    return "\n".join(lines)


def loss_metrics(rows: Sequence[Row]) -> str:
    """Return the time of our loss over that of interpolate + cross_entropy, as CUDA graphs, for each shape."""
    times = {(row["shape"], row["logits"], row["way"]): row.get("ms, graph") for row in rows}
    lines = []
    for (shape, dtype, way), ours_ms in times.items():
        plain_ms = times.get((shape, dtype, "interpolate + cross_entropy"))
        if way == "ours" and ours_ms and plain_ms:
            lines.append(f"- {shape}, {dtype}: {ours_ms / plain_ms:.2f} of the time of interpolate + cross_entropy")
    return "\n".join(lines) or "No kernel was timed: this machine has no card."


METRICS: dict[str, Callable[[Sequence[Row]], str]] = {"plan": plan_metrics, "loss": loss_metrics}
"""By row: what is said about all its figures together."""


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


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
