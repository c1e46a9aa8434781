"""Completion in bash, zsh and fish."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import typer
from hypothesis import given
from hypothesis import strategies as st

from segapp.cli import app
from segapp.completion import SCRIPTS, answer, split_line

RUN = "my run; $(touch pwned)"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two runs, a config, and the program on its own PATH."""
    folder = tmp_path_factory.mktemp("shell")
    (folder / "bin").mkdir()
    program = folder / "bin" / "segapp"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m segapp "$@"\n')
    program.chmod(0o755)
    for name in ("demo-7", RUN):
        (folder / "runs" / name).mkdir(parents=True)
        (folder / "runs" / name / "run.json").write_text("{}")
    (folder / "configs").mkdir()
    (folder / "configs" / "mine.yaml").write_text("name: mine\n")
    return folder


def shell(here: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "HOME": str(here)}
    return subprocess.run(words, capture_output=True, text=True, timeout=120, cwd=here, env=environ)


def in_process(line: str, breaks: str = "") -> list[str]:
    return [each.partition("\t")[0] for each in answer(typer.main.get_command(app), ["line", line, breaks])]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("segapp compl", ["completion"]),
        ("segapp ckpt ", ["list", "verify"]),
        ("segapp train --res", ["--resume"]),
        ("segapp train --plain --pl", []),
        ("segapp train --config mi", ["mine.yaml"]),
        ("segapp train --config=mi", ["--config=mine.yaml"]),
        ("segapp train --config mine.yaml optim.mom", ["optim.momentum="]),
        ("segapp train data.format=c", ["data.format=camvid", "data.format=cityscapes"]),
        ("segapp train log.tensorboard=", ["log.tensorboard=true", "log.tensorboard=false"]),
        ("segapp train train.ema=", ["train.ema=null"]),
        ("segapp eval demo", ["demo-7"]),
        ('segapp eval "my', [RUN]),
        ("segapp ctl demo-7 set gp", ["gpu0_bsz="]),
        ("segapp export demo-7 --format sa", ["safetensors"]),
        ("segapp export demo-7 dem", []),
        ("segapp predict demo-7 pho", []),
        ("segapp completion z", ["zsh"]),
        ("segapp docs several-g", ["several-gpus"]),
    ],
)
def test_candidates_of_a_command_line(
    here: Path, monkeypatch: pytest.MonkeyPatch, line: str, expected: list[str]
) -> None:
    monkeypatch.chdir(here)
    assert sorted(in_process(line)) == sorted(expected)


def test_every_command_and_option_is_a_candidate() -> None:
    root = typer.main.get_command(app)
    assert {*in_process("segapp ")} == {name for name, command in root.commands.items() if not command.hidden}
    for name, command in root.commands.items():
        options = {spelling for p in command.params for spelling in p.opts if spelling.startswith("-")}
        assert {*in_process(f"segapp {name} -")} == options


@given(st.text(max_size=30))
def test_any_command_line_is_completed_without_error(line: str) -> None:
    assert split_line(line)
    assert isinstance(in_process(f"segapp {line}", "=:"), list)


BASH = """source <(segapp completion bash)
COMP_LINE={line!r}; COMP_POINT=${{#COMP_LINE}}; _segapp segapp; printf '%s\\n' "${{COMPREPLY[@]}}" """


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("segapp tr", ["train"]),
        ("segapp train optim.options.nest", ["optim.options.nesterov="]),
        ("segapp train optim.options.nesterov=t", ["true"]),  # bash splits the word at the sign
        ("segapp status dem", ["demo-7"]),
        ("segapp status my", [RUN]),
        ("segapp train --config mi", ["mine.yaml"]),
    ],
)
def test_bash_completes_commands(here: Path, line: str, expected: list[str]) -> None:
    done = shell(here, "bash", "--norc", "-c", BASH.format(line=line))
    assert done.stdout.splitlines() == expected, done.stderr
    assert not (here / "pwned").exists()


def test_tab_key_in_bash_completes(here: Path) -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(here)
        environ = {**os.environ, "PATH": f"{here / 'bin'}:{os.environ['PATH']}", "TERM": "dumb", "PS1": "> "}
        os.execvpe("bash", ["bash", "--norc", "--noprofile", "-i"], environ)
    try:
        os.write(terminal, b"source <(segapp completion bash); echo rea''dy\n")
        said = _until(terminal, b"ready\r\n")
        os.write(terminal, b"segapp train --config mi\t")
        said = _until(terminal, b"mine.yaml ")
        os.write(terminal, b"train.acc\t")
        said = _until(terminal, b"train.accumulate=")
        assert not said.endswith(b" ")
        os.write(terminal, b"\x15segapp predict demo-7 conf\t")  # ^U clears the line
        _until(terminal, b"configs/")  # a file, completed by bash
    finally:
        os.close(terminal)
        os.waitpid(pid, 0)


def _until(terminal: int, wanted: bytes, timeout_s: float = 120) -> bytes:
    said, end_s = b"", time.monotonic() + timeout_s
    while wanted not in said:
        ready = select.select([terminal], [], [], max(0.0, end_s - time.monotonic()))[0]
        assert ready, said
        said += os.read(terminal, 4096)
    return said


ZSH = """compdef() {{ : }}; _files() {{ print files }}; compadd() {{ shift $(( ${{@[(i)--]}} )); print -l -- "$@" }}
source <(segapp completion zsh)
words=({words}); CURRENT=$#words; _segapp"""


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_zsh_completes_commands(here: Path) -> None:
    for words, expected in [
        ("segapp train optim.mom", "optim.momentum=\n"),
        ("segapp status my", f"{RUN}\n"),
        ("segapp predict demo-7 ''", "files\n"),
    ]:
        done = shell(here, "zsh", "-f", "-c", ZSH.format(words=words))
        assert done.stdout == expected, done.stderr
    assert not (here / "pwned").exists()


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_fish_completes_commands(here: Path) -> None:
    for line, expected in [
        ("segapp train optim.mom", ["optim.momentum="]),
        ("segapp status dem", ["demo-7"]),
        ("segapp predict demo-7 con", ["configs/"]),
    ]:
        done = shell(here, "fish", "--no-config", "-c", f"segapp completion fish | source; complete -C '{line}'")
        assert [found.partition("\t")[0] for found in done.stdout.splitlines()] == expected, done.stderr


def test_unknown_shell_is_one_clear_error(here: Path) -> None:
    done = shell(here, "segapp", "completion", "tcsh")
    assert (done.returncode, done.stderr) == (
        2,
        f"error: no completion for 'tcsh': use one of {', '.join(SCRIPTS)}\n",
    )
