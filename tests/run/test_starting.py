"""What a training prints, with and without a reader."""

from __future__ import annotations

import os
import sys

import pytest

from segapp.run.words import announce, last_announced, outlast_readers


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
