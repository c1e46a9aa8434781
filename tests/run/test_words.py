"""Words that a training prints, with and without a reader; the others are tested with the screen that shows them."""

from __future__ import annotations

import os
import sys

import pytest

from segapp.run.words import announce, first_line, last_announced, outlast_readers, size
from tests.support.fault_table import case


@case(
    "F39",
    how="stdout or stderr whose reader leaves after a line",
    passes="the program goes on and writes, no BrokenPipe traceback",
)
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_output_goes_on_after_its_reader_has_left(monkeypatch: pytest.MonkeyPatch, stream: str) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", sys.stdout)
        monkeypatch.setattr(sys, "stderr", sys.stderr)
        monkeypatch.setattr(sys, stream, pipe)
        outlast_readers()
        print("read", file=getattr(sys, stream), flush=True)
        assert os.read(reading, 100) == b"read\n"
        os.close(reading)
        for line in ("lost", "lost too", 2**17 * "x"):
            print(line, file=getattr(sys, stream), flush=True)
        assert getattr(sys, stream).fileno() == writing


def test_last_announced_line_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    announce("finding the images")
    announce("first step")
    lines = capsys.readouterr().out.splitlines()
    assert last_announced([*lines, "epoch 1"]) == "first step"
    assert last_announced(["epoch 1"]) is None


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (1.5 * 2**20, "1.5 MiB"), (117 * 2**20, "117 MiB"), (2.25 * 2**30, "2.2 GiB")],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_first_line_is_the_message_or_the_type() -> None:
    assert first_line(ValueError("\n abc\nd")) == "abc"
    assert first_line(ValueError()) == "ValueError"
