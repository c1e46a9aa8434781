"""A program in the place of nvidia-smi, and what nvidia-smi prints of three GPUs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

THREE_GPUS = """\
0, GPU-aaaa, 10, 24220, 4220, 20000, 535.1, Fast Card, 1, Disabled, Disabled, 50
1, GPU-bbbb, [N/A], 24220, 1000, 23220, 535.1, Fast Card, 2, Disabled, Disabled, [N/A]
2, GPU-cccc, 99, 11019, 11000, 19, 535.1, Small Card, 3, Disabled, Disabled, 80
"""
"""The second one says nothing about its load and temperature."""


def fake_smi(folder: Path, script: str, monkeypatch: pytest.MonkeyPatch, name: str = "nvidia-smi") -> None:
    """Puts a shell script in the place of the program for a test."""
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
