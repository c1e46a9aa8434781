"""Real pictures: what a terminal answers, the codes of Kitty and sixel read back, and both on the screen."""

from __future__ import annotations

import base64
import io
import os
import re
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from textual.pilot import Pilot

from segapp.tui import graphics
from segapp.tui.app import MonitorApp
from segapp.tui.graphics import Graphics, find_graphics, kitty_codes, kitty_rows, parse_answer, sixel_codes
from tests.support.recorded_runs import RecordedRun
from tests.support.screens import press, run_screen, screen_text, settle

OK = b"\x1b_Gi=31;OK\x1b\\"


@pytest.mark.parametrize(
    ("answer", "found"),
    [
        (b"\x1b[?62;4;22c", ("sixel", (10, 20))),
        (b"\x1b[6;18;9t\x1b[?65;1;4c", ("sixel", (9, 18))),
        (OK + b"\x1b[6;36;17t\x1b[?62;52c", ("kitty", (17, 36))),
        (OK + b"\x1b[?62;4c", ("sixel", (10, 20))),  # WezTerm: its Kitty protocol has no placeholders
        (b"\x1b_Gi=31;EINVAL:no\x1b\\\x1b[?62c", None),
        (b"\x1b[?4;6c", None),  # class 4 of terminals, not attribute 4
        (b"\x1b[6;0;0t\x1b[?62;4c", None),
        (b"\x1b[?1;2c", None),  # tmux without sixel
        (OK, None),  # no answer to the last question
        (b"q", None),
    ],
)
def test_answer_of_a_terminal_names_its_protocol(answer: bytes, found: tuple[str, tuple[int, int]] | None) -> None:
    assert parse_answer(answer) == found


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Return the far end of a pseudo-terminal that stands for this process's terminal."""
    far, near = os.openpty()
    with os.fdopen(near, "rb", buffering=0, closefd=False) as source, os.fdopen(near, "wb", buffering=0) as sink:
        monkeypatch.setattr(graphics.sys, "__stdin__", source)
        monkeypatch.setattr(graphics.sys, "__stderr__", sink)
        yield far
    os.close(far)


def test_terminal_is_asked_and_left_as_it_was(terminal: int) -> None:
    before = termios.tcgetattr(terminal)
    questions = []

    def answer() -> None:
        while b"\x1b[c" not in b"".join(questions):
            questions.append(os.read(terminal, 99))
        for part in (OK, b"\x1b[6;16;8t\x1b[?6", b"2;22c"):  # in pieces, as over a slow line
            os.write(terminal, part)
            time.sleep(0.02)

    thread = threading.Thread(target=answer)
    thread.start()
    assert find_graphics(10.0) == ("kitty", (8, 16))
    thread.join()
    assert b"a=q" in b"".join(questions)
    assert termios.tcgetattr(terminal) == before


def test_terminal_that_does_not_answer_is_not_waited_for(terminal: int) -> None:
    os.write(terminal, b"\x1b[6;16;8t")  # and not a word more
    began_s = time.monotonic()
    assert find_graphics(0.2) is None
    assert time.monotonic() - began_s < 5.0


def picture(width: int, height: int) -> Image.Image:
    rng = np.random.default_rng(0)
    colors = rng.integers(0, 256, (60, 3), dtype=np.uint8)
    return Image.fromarray(colors[rng.integers(0, 60, (height, width // 3 + 1))].repeat(3, 1)[:, :width])


def test_kitty_codes_hold_the_picture() -> None:
    image = picture(200, 90)
    parts = re.findall(r"\x1b_G([^;]*);([^\x1b]*)\x1b\\", kitty_codes(image, 7, (25, 6)))
    assert len(parts) > 2
    assert parts[0][0] == "a=T,U=1,f=100,q=2,i=7,c=25,r=6,m=1"
    assert [keys for keys, _ in parts[1:]] == ["m=1"] * (len(parts) - 2) + ["m=0"]
    assert all(len(data) <= 4096 for _, data in parts)
    found = Image.open(io.BytesIO(base64.b64decode("".join(data for _, data in parts))))
    assert np.array_equal(np.asarray(found), np.asarray(image))


def test_kitty_rows_are_numbered_as_kitty_numbers_them() -> None:
    """Compare with lines of kitty's rowcolumn-diacritics.txt."""
    rows = kitty_rows((3, 128))
    assert {row[0] + row[3:] for row in rows} == {"\U0010eeee" * 3}
    assert {row[2] for row in rows} == {"\u0305"}
    published = {0: 0x305, 1: 0x30D, 3: 0x310, 8: 0x346, 17: 0x363, 30: 0x483, 54: 0x610, 69: 0x6D6, 84: 0x6EC,
                 99: 0x74A, 106: 0x7F1, 127: 0x82C}  # fmt: skip
    assert {at: ord(rows[at][1]) for at in published} == published


def sixel_picture(codes: str) -> NDArray[np.int64]:
    """Return the RGB picture of sixel codes, drawn as the VT330/VT340 manual says."""
    head, body = re.fullmatch(r'\x1bP0;1q"1;1;(\d+;\d+)(.*)\x1b\\', codes).groups()  # type: ignore[union-attr]
    width, height = map(int, head.split(";"))
    drawn, palette = np.full((height + 6, width, 3), -1), {}
    x = top = color = 0
    for one in re.finditer(r"#(\d+);2;(\d+);(\d+);(\d+)|#(\d+)|!(\d+)(.)|([$-])|([?-~])", body):
        number, *shares, chosen, count, repeated, move, single = one.groups()
        if number:
            palette[int(number)] = [round(int(share) * 2.55) for share in shares]
        elif chosen:
            color = int(chosen)
        elif move:
            x, top = 0, top + 6 * (move == "-")
        else:
            bits, times = ord(repeated or single) - 63, int(count or 1)
            for row in range(6):
                if bits >> row & 1:
                    drawn[top + row, x : x + times] = palette[color]
            x += times
    assert (drawn[height:] == -1).all(), "nothing below the picture"
    return drawn[:height]


@pytest.mark.parametrize("size", [(31, 13), (1, 1), (40, 6)])
def test_sixel_codes_draw_the_picture(size: tuple[int, int]) -> None:
    image = picture(*size)
    found = sixel_picture(sixel_codes(image))
    assert abs(found - np.asarray(image)).max() <= 2  # sixel has steps of one percent


@pytest.fixture
def run(tmp_path: Path) -> RecordedRun:
    run = RecordedRun(tmp_path / "run", steps_per_epoch=5, epochs=8)
    run.epoch()
    run.draw_samples()
    return run


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the codes that the screen writes to the terminal."""
    found: list[str] = []
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(MonitorApp, "_write_control", lambda app, codes: found.append(codes))
    return found


def test_kitty_shows_pictures_in_place_of_text(run: RecordedRun, written: list[str]) -> None:
    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        text = screen_text(app)
        assert "▀" not in text
        keys = [dict(re.findall(r"(\w)=(\w+)", code.partition(";")[0])) for code in written if "a=T" in code]
        assert len({key["i"] for key in keys}) == len(keys) == 3
        assert text.count("\U0010eeee") == sum(int(key["c"]) * int(key["r"]) for key in keys)
        await settle(app, pilot)
        assert sum("a=T" in code for code in written) == 3, "a picture is sent once"

    run_screen(run, act, graphics=Graphics("kitty", (8, 16)))


def test_sixels_are_drawn_over_the_half_blocks(run: RecordedRun, written: list[str]) -> None:
    def sixels() -> list[tuple[int, int]]:
        found = [re.match(r"\x1b7\x1b\[(\d+);(\d+)H\x1bP0;1q", code) for code in written]
        written.clear()
        return [(int(each[1]), int(each[2])) for each in found if each is not None]

    async def act(app: MonitorApp, pilot: Pilot[None]) -> None:
        await press(app, pilot, "i")
        lines = screen_text(app).splitlines()
        places = sixels()
        assert len(set(places)) == 3
        assert all(lines[y - 1][x - 1] == "▀" for y, x in places)
        assert all(lines[y - 2][x - 1 :].startswith(("image", "target", "prediction")) for y, x in places)
        await press(app, pilot, "question_mark")
        sixels()
        app.screen_stack[0].refresh()
        await settle(app, pilot)
        assert not sixels(), "a dialog is open"
        await press(app, pilot, "escape")
        assert len(set(sixels())) == 3
        await press(app, pilot, "i")
        assert not sixels(), "the chart is shown"

    run_screen(run, act, graphics=Graphics("sixel", (8, 16)))
