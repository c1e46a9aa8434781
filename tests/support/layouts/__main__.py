"""`python -m tests.support.layouts [NAME ...]`: the table of what `segapp init` makes of the drawn layouts."""

from __future__ import annotations

import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from tests.support.layouts import ROOMS
from tests.support.layouts.judge import Verdict, answered, judged, summary
from tests.support.layouts.layout import DrawnLayout

HEAD = (
    "| layout | read as | classes | right | splits and groups | not named | result |\n|---|---|---|---|---|---|---|\n"
)


def row(layout: DrawnLayout, verdict: Verdict, result: str) -> str:
    """Returns a layout as a line of the table."""
    more = f" and {len(verdict.classes) - 6} more" if len(verdict.classes) > 6 else ""
    names = ", ".join(verdict.classes[:6]) + more
    splits = [reason for reason in verdict.wrong if re.search(r"split|test|groups|left out", reason)]
    others = [reason for reason in verdict.wrong if reason not in splits]
    if others:
        result += f": {'; '.join(others)[:160]}"
    elif verdict.unusable:
        result += f": {verdict.unusable[:160]}"
    right = f"{verdict.num_right} of {verdict.num_true}" if verdict.outcome == "read" else ""
    cells = [layout.name, verdict.read_as, names, right, "; ".join(splits) or ("yes" if right else ""),
             ", ".join(verdict.unnamed), result]  # fmt: skip
    return "| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |\n"


def line_and_result(layout: DrawnLayout, folder: Path) -> tuple[str, str]:
    """Returns a layout as a line of the table, and the result for the count."""
    try:
        truth, verdict = judged(layout, folder)
        result = summary(layout, verdict)
        if verdict.question is not None and answered(layout, truth, folder, verdict) is None:
            result = "asked, but no answer is right"
    except Exception as error:  # the table shows what is broken, too
        verdict = Verdict("refused", f"{type(error).__name__}: {error}", wrong=["a traceback"])
        result = "a traceback"
    return row(layout, verdict, result).replace(str(folder), ""), result


def main(names: list[str]) -> None:
    """Prints a table for each room, and the counts."""
    for room, layouts in ROOMS.items():
        counts: Counter[str] = Counter()
        lines = []
        for layout in layouts:
            if not names or layout.name in names:
                with tempfile.TemporaryDirectory() as folder:
                    line, result = line_and_result(layout, Path(folder))
                lines.append(line)
                counts[result] += 1
        if lines:
            print(f"## {room}: {len(lines)} layouts\n\n{HEAD}{''.join(lines)}")
            print(", ".join(f"{result}: {count}" for result, count in counts.most_common()), end="\n\n", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
