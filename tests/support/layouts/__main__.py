"""`python -m tests.support.layouts [NAME ...]`: the table of what `segapp init` makes of the drawn layouts."""

from __future__ import annotations

import re
import sys
import tempfile
from pathlib import Path

from tests.support.layouts import LAYOUTS
from tests.support.layouts.judge import judged, problems

print("| layout | read as, asked or refused | classes | differs from the drawing |\n|---|---|---|---|")
for layout in LAYOUTS.values():
    if layout.name in sys.argv[1:] or len(sys.argv) == 1:
        with tempfile.TemporaryDirectory() as folder:
            _, verdict = judged(layout, Path(folder))
        match = re.search(r"layout: (.*?) \((\d+% sure)", verdict.said)
        found = f"{match[1]}, {match[2]}" if match else f"{verdict.outcome}: ... {verdict.said[-70:]}"
        cells = layout.name, found, ", ".join(verdict.classes), "; ".join(problems(layout, verdict))
        print("| " + " | ".join(cell.replace("|", "/").replace("\n", " ") for cell in cells) + " |", flush=True)
