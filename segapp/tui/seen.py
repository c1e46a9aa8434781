"""Which alerts of which runs the user has seen, kept in `$XDG_STATE_HOME/segapp/seen.json`."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path

from segapp.run.files import write_atomic

_MAX_RUNS = 300


def seen_path() -> Path:
    """Return the path of the file."""
    base = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(base).expanduser() / "segapp" / "seen.json"


def load_seen(path: Path | None, run_id: str) -> dict[str, float]:
    """Return, for each kind of alert, the time of the last one seen; empty if nothing can be read."""
    found = _read(path).get(run_id)
    if not isinstance(found, dict):
        return {}
    return {kind: float(seen_s) for kind, seen_s in found.items() if isinstance(seen_s, int | float)}


def save_seen(path: Path | None, run_id: str, seen_s: dict[str, float]) -> None:
    """Keep what was seen of a run, and of the runs before it; ignore errors."""
    if path is None:
        return
    kept = _read(path)
    kept.pop(run_id, None)
    kept[run_id] = seen_s
    while len(kept) > _MAX_RUNS:
        del kept[next(iter(kept))]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, json.dumps(kept) + "\n")


def _read(path: Path | None) -> dict[str, object]:
    try:
        raw = json.loads(path.read_text()) if path is not None else {}
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}
