"""Completion in bash, zsh and fish, by typer's scripts."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from segapp.cli import SHELLS

HOSTILE = ("my $(touch pwned)", "my$(touch${IFS}pwned)", "my`touch${IFS}pwned`", "my;touch pwned", "my'", "my*", "my\n")


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with runs, one of a plain name, a config, and the program on its own PATH."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "bin").mkdir()
    program = folder / "bin" / "segapp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m segapp "$@"\n')
    program.chmod(0o755)
    for name in ("demo-7", "my_run.2", *HOSTILE):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.json").write_text("{}")
    (folder / "configs").mkdir()
    (folder / "configs" / "mine.yaml").write_text("name: mine\n")
    (folder / "configs" / "mi$(touch pwned).yaml").write_text("name: mine\n")
    return folder


def shell(here: Path, *words: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "HOME": str(here), **more}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=here, env=environ)


BASH = """source <(segapp completion bash)
COMP_WORDS=({line}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); _segapp_completion segapp
printf '%s\\n' "${{COMPREPLY[@]}}" """


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("segapp tr", ["train"]),
        ("segapp ckpt ''", ["list", "verify"]),
        ("segapp train --res", ["--resume"]),
        ("segapp train --config mi", ["mine.yaml"]),
        ("segapp status my", ["my_run.2"]),
        ("segapp compare demo-7 my", ["my_run.2"]),
        ("segapp docs several-g", ["several-gpus"]),
        ("segapp predict demo-7 pho", [""]),  # the shell then completes files
    ],
)
def test_bash_completes_commands_options_and_names(here: Path, line: str, expected: list[str]) -> None:
    done = shell(here, "bash", "--norc", "-c", BASH.format(line=line))
    assert done.stdout.splitlines() == expected, done.stderr
    assert not (here / "pwned").exists()


@pytest.fixture
def terminal(here: Path) -> Iterator[int]:
    """An interactive bash in the folder, with the completion sourced."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here)
        environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environ)
    try:
        os.write(terminal, b"source <(segapp completion bash); echo rea''dy\n")
        until(terminal, b"ready\r\n")
        yield terminal
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def until(terminal: int, wanted: bytes, timeout_s: float = 120) -> bytes:
    said, end_s = b"", time.monotonic() + timeout_s
    while wanted not in said:
        ready = select.select([terminal], [], [], max(0.0, end_s - time.monotonic()))[0]
        assert ready, said
        said += os.read(terminal, 4096)
    return said


def test_tab_and_enter_in_bash_run_no_name(here: Path, terminal: int) -> None:
    os.write(terminal, b"segapp train --config mi\t")
    until(terminal, b"mine.yaml ")
    os.write(terminal, b"\x15segapp predict demo-7 conf\t")  # ^U clears the line
    until(terminal, b"configs/")  # a file, completed by bash
    os.write(terminal, b"\x15segapp status my\t")
    until(terminal, b"my_run.2 ")
    os.write(terminal, b"\x15segapp status my\t\x15: my\t\necho do''ne\n")
    until(terminal, b"done\r\n")
    assert not (here / "pwned").exists()
    os.write(terminal, b"echo $(touch pwned)\necho ag''ain\n")
    until(terminal, b"again\r\n")
    assert (here / "pwned").exists(), "the name would have run"
    (here / "pwned").unlink()


ZSH = """autoload -Uz compinit; compinit -u -D; _arguments() {{ print -r -- "$1" }}
source <(segapp completion zsh)
words=({line}); CURRENT=$#words; _segapp_completion"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_evaluates_no_name(here: Path) -> None:
    done = shell(here, "zsh", "-f", "-c", ZSH.format(line="segapp status my"))
    assert "my_run.2" in done.stdout, done.stderr
    assert "touch" not in done.stdout
    assert not (here / "pwned").exists()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_names(here: Path) -> None:
    for line, expected in [("segapp status dem", ["demo-7"]), ("segapp status my", ["my_run.2"])]:
        done = shell(here, "fish", "--no-config", "-c", f"segapp completion fish | source; complete -C '{line}'")
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == expected, done.stderr


@pytest.mark.parametrize("words", ["segapp nonsense --x ", "segapp train --config", "'", "segapp \0"])
def test_impossible_lines_print_nothing_on_stderr(here: Path, words: str) -> None:
    asked = {"_SEGAPP_COMPLETE": "complete_bash", "COMP_WORDS": words.replace("\0", "\x01"), "COMP_CWORD": "7"}
    done = shell(here, "segapp", **asked)
    assert (done.returncode, done.stderr) == (0, "")


def test_unknown_shell_is_one_clear_error(here: Path) -> None:
    done = shell(here, "segapp", "completion", "tcsh")
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: no completion for 'tcsh': use one of {', '.join(SHELLS)}\n")
