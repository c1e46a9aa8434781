"""Completion of commands and options, by typer's script for bash."""

from __future__ import annotations

import pytest

from segapp.__main__ import main


@pytest.mark.parametrize(
    ("line", "expected"),
    [("segapp tr", ["train"]), ("segapp train --res", ["--resume"]), ("segapp nonsense --x ", None),
     ("segapp train --config", None), ("'", None)],
)  # fmt: skip
def test_lines_are_completed_without_a_word_on_stderr(
    line: str, expected: list[str] | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_SEGAPP_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", line)
    monkeypatch.setenv("COMP_CWORD", "7" if expected is None else str(line.count(" ")))
    with pytest.raises(SystemExit) as ended:
        main([])
    shown = capsys.readouterr()
    assert (ended.value.code or 0, shown.err) == (0, "")
    assert expected is None or shown.out.split() == expected
