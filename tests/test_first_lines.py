"""The first line of every command comes before torch is imported or a process is started, which takes seconds."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from segapp.cli import app

COMMANDS = {
    "attach": "attach",
    "check": "check --config demo --json",
    "check-part": "check-part --config demo",
    "ckpt": "ckpt list demo",
    "compare": "compare demo demo-2",
    "ctl": "ctl demo stop",
    "docs": "docs train",
    "doctor": "doctor",
    "eval": "eval demo",
    "export": "export demo --format onnx --out demo.onnx",
    "init": "init photos",
    "launch": "launch --nproc-per-node 2 -- train --config demo --run demo",
    "ls": "ls",
    "models": "models unet",
    "plan": "plan --config demo --gpus 1x8000MiB",
    "predict": "predict demo photos --out out",
    "report": "report demo",
    "schema": "schema",
    "status": "status demo",
    "suspects": "suspects demo",
    "sweep": "sweep --config demo seed=0,1 --jobs 2",
    "train": "train --config demo --plain",
}
"""A command line of each command that goes as far as it can without a run."""

CODE = """
import json, os, subprocess, sys
import numpy, segapp.commands.plan, segapp.commands.runs, segapp.commands.sweep  # once for all commands
from segapp.__main__ import main

class Terminal:
    text = ""
    encoding = "utf-8"
    def isatty(self): return True
    def write(self, text): Terminal.text += text; return len(text)
    def flush(self): pass
    def fileno(self): raise OSError("none")

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            answer("torch")

def answer(end):
    os.write(writing, json.dumps([end, Terminal.text[:200]]).encode())
    os._exit(0)

found = {}
for name, line in json.loads(sys.argv[1]).items():
    reading, writing = os.pipe()
    if os.fork() == 0:
        sys.stdout = sys.stderr = Terminal()
        sys.meta_path.insert(0, Torch())
        subprocess.Popen = lambda *words, **options: answer("process")
        try:
            main(line.split())
        except BaseException as error:
            answer(repr(error))
        answer("end")
    os.close(writing)
    found[name] = json.loads(os.read(reading, 2**16))
    os.wait()
print(json.dumps(found))
"""


def test_every_command_prints_before_it_imports_torch(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(Path(__file__).parents[1] / "data")
    group = typer.main.get_command(app)
    assert set(COMMANDS) == set(group.commands), "a new command belongs here"  # type: ignore[attr-defined]
    words = [sys.executable, "-c", CODE, json.dumps(COMMANDS)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240, check=False, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name for name, (end, text) in found.items() if not text} == set(), found
    importing = {name for name, (end, _) in found.items() if end == "torch"}
    assert importing >= {"export", "train"}
    others = {"attach", "compare", "ctl", "docs", "eval", "init", "ls", "plan", "predict", "report", "schema", "status",
              "sweep"}  # fmt: skip
    assert importing.isdisjoint(others)


PIPED = """
import sys
from segapp.__main__ import main

class Torch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            sys.exit(75)

sys.meta_path.insert(0, Torch())
main(sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("words", "message", "code"),
    [
        ("predict nowhere data --out out", "nowhere: no such run", 2),
        ("predict here photo --out out", "photo is neither a file nor a folder: check the path", 3),
        (COMMANDS["export"], "", 75),  # up to the import of torch, by which a terminal has a line
    ],
)
def test_pipes_get_refusals_of_paths_before_torch_and_no_more(
    tmp_path: Path, words: str, message: str, code: int
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "1.png").touch()
    (tmp_path / "runs" / "here").mkdir(parents=True)
    (tmp_path / "runs" / "here" / "run.json").write_text("{}")
    line = [sys.executable, "-c", PIPED, *words.split()]
    done = subprocess.run(line, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert message in done.stderr
    assert (done.returncode, done.stdout, bool(done.stderr)) == (code, "", bool(message))


SLOW = """
import functools, sys, time
import segapp.__main__, segapp.commands.runs

segapp.__main__.lines_while = functools.partial(segapp.__main__.lines_while, first_s=0.3)
segapp.commands.runs.print_runs = lambda *_, **__: time.sleep(0.6) or print("[]")
segapp.__main__.main(sys.argv[1:])
"""


def test_long_command_without_a_terminal_prints_a_line_on_stderr() -> None:
    words = [sys.executable, "-c", SLOW, "ls", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=280, check=False)
    assert (done.returncode, done.stdout) == (0, "[]\n")
    assert done.stderr == "segapp ls: still running (0 s so far)\n"
