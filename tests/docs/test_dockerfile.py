"""The Dockerfile of the page `platforms`: its instructions, copied files and commands. It is not built."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import tomllib

from tests.support import ROOT
from tests.support.page_blocks import blocks

(BLOCK,) = [block for block in blocks() if block.language == "dockerfile"]
KNOWN = {"FROM", "RUN", "WORKDIR", "COPY", "ENV", "ENTRYPOINT"}


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments), with continued lines joined."""
    lines = re.sub(r"\\\n\s*", " ", BLOCK.text).splitlines()
    return [(line.partition(" ")[0], line.partition(" ")[2]) for line in lines if line.strip()]


def test_instructions_copy_what_the_build_reads() -> None:
    assert instructions()[0][0] == "FROM"
    assert {name for name, _ in instructions()} <= KNOWN
    (base,) = [text for name, text in instructions() if name == "FROM"]
    assert tuple(int(part) for part in re.findall(r"\d+", base)) >= (3, 11), "requires-python of pyproject.toml"
    (entry,) = [json.loads(text) for name, text in instructions() if name == "ENTRYPOINT"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert entry[0] in project["project"]["scripts"]
    for text in (text for name, text in instructions() if name == "RUN"):
        assert subprocess.run(["bash", "-nc", text], check=False).returncode == 0, text
    copied = {word for name, text in instructions() if name == "COPY" for word in shlex.split(text)[:-1]}
    assert [source for source in copied if not (ROOT / source).exists()] == []
    wheel, own = project["tool"]["hatch"]["build"]["targets"]["wheel"], project["project"]
    assert {
        own["readme"],
        *own["license-files"],
        *wheel["packages"],
        *wheel["force-include"],
        "pyproject.toml",
    } <= copied
