"""Files and folders that a config names are looked for before torch is imported, by every command that needs them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
RUNNER = """
import contextlib, io, json, sys
sys.modules["torch"] = None  # its import fails
from segapp.__main__ import main
for words in json.load(sys.stdin):
    err = io.StringIO()
    with contextlib.redirect_stderr(err), contextlib.suppress(Exception):
        try:
            main(words)
        except SystemExit as end:
            print(json.dumps([end.code, err.getvalue()]))
"""
LISTED = ["data.format=list", "data.classes=[a,b]", "data.train_split=second"]
CASES = {
    "data.root=nope/data": (3, "data root nope/data does not exist"),
    "data.root=a_file": (3, "data root a_file is not a folder"),
    "data.root=data/dem": (3, "did you mean data/demo"),
    "data.val_split=vla": (3, "demo/leftImg8bit/vla does not exist (data/demo/leftImg8bit holds train, val): did you"),
    "data.list_dir=lists": (
        3,
        "lists/second.txt cannot be read (No such file or directory): did you mean seconds.txt?",
    ),
    "model.weights=runs/gone/best.pt": (4, "model.weights: no file runs/gone/best.pt; give the path of a weights"),
    "model.weights_backbone=back.safetensors": (4, "model.weights_backbone: no file back.safetensors"),
    "loss.name=./parts.py:Own": (2, "loss.name = ./parts.py:Own: there is no file ./parts.py"),
    "model.weights=a_run": (1, "import of torch halted"),  # everything is there: only torch is missing
}


def test_missing_paths_are_found_without_torch(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(REPOSITORY / "data")
    (tmp_path / "a_file").touch()
    (tmp_path / "lists").mkdir()
    (tmp_path / "lists/seconds.txt").touch()
    run = tmp_path / "runs/a_run"
    run.mkdir(parents=True)
    (run / "run.json").write_text("{}")
    config = (REPOSITORY / "configs/demo.yaml").read_text()
    (run / "config.yaml").write_text(config.replace("root: data/demo", "root: moved"))
    demo = ["--config", str(REPOSITORY / "configs/demo.yaml")]
    expected = {
        ("train", way, *demo, *(LISTED if "list_dir" in word else ()), word): text
        for word, text in CASES.items()
        for way in (("--plain", "--detach", "--smoke") if "root=nope" in word else ("--plain",))
    }
    expected |= {
        ("eval", "a_run"): (3, "data root moved does not exist"),
        ("eval", "a_run", "--data-root", "data/demo", "--split", "tarin"): (3, "did you mean train?"),
        ("eval", "a_run", "data.root=x"): (2, "data.root=x: no such run"),
    }
    given = json.dumps(list(expected))
    command = [sys.executable, "-c", RUNNER]
    done = subprocess.run(command, input=given, capture_output=True, text=True, cwd=tmp_path, timeout=280, check=True)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    for words, (code, text), (got_code, got_text) in zip(expected, expected.values(), found, strict=True):
        assert code == got_code, (words, got_code, got_text)
        assert text in got_text, (words, got_text)
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["a_run"]  # no folder of a run was made
