"""Layouts, keys, settings, numbers as text, by tables."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from segapp.run.words import age, duration, gib, learning_rate, memory_text, number, percent, plural
from segapp.tui import keys
from segapp.tui.layout import plan_layout
from segapp.tui.widgets import ascii_text, progress
from segapp.view.wording import clip, fit_cells


@pytest.mark.parametrize(
    ("size", "pane", "panes"),
    [
        ((120, 36), "loss", {"loss", "events", "gpu", "gpu0", "classes"}),
        ((100, 30), "loss", {"loss", "events", "gpu", "gpu0", "classes"}),
        ((100, 29), "loss", {"loss", "gpu", "gpu0", "classes"}),
        ((100, 29), "events", {"events", "gpu", "gpu0", "classes"}),
        ((120, 36), "pictures", {"pictures", "events", "gpu", "gpu0", "classes"}),
        ((99, 40), "loss", {"loss"}),
        ((80, 24), "gpu", {"gpu", "gpu0"}),
        ((60, 15), "classes", {"classes"}),
        ((59, 15), "loss", set()),
        ((60, 14), "loss", set()),
    ],
)
def test_layout_of_each_screen_size(size: tuple[int, int], pane: str, panes: set[str]) -> None:
    plan = plan_layout(*size, pane)
    assert plan.panes == panes
    assert plan.is_notice == (not panes)


def test_layout_gives_room_to_lines_and_columns_by_size() -> None:
    assert [plan_layout(width, 30).right_width for width in (100, 104, 140, 180, 300)] == [48, 49, 58, 68, 68]
    assert [plan_layout(120, height).has_throughput for height in (21, 22)] == [False, True]
    assert [plan_layout(80, height).has_throughput for height in (19, 20)] == [False, True]
    assert not plan_layout(80, 30, "gpu").has_throughput
    assert plan_layout(120, 36, "classes", is_zoomed=True).panes == {"classes"}
    assert [plan_layout(*size).has_small for size in ((160, 30), (159, 30), (160, 29))] == [True, False, False]
    assert not plan_layout(160, 30, "pictures").has_small
    assert not plan_layout(160, 30, is_zoomed=True).has_small
    assert (plan_layout(80, 24, "gpu").has_left, plan_layout(80, 24).has_left) == (False, True)


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (number(0.3412), "0.341"), (number(2.345), "2.35"), (number(12.345), "12.3"), (number(123.4), "123"),
        (number(12345.0), "1.2e4"), (number(0.00012), "1.2e-4"), (number(0.0), "0.000"), (number(None), "-"),
        (number(math.nan), "-"), (number(math.inf), "inf"), (number(-0.5), "-0.500"),
        (number(1e-3), "0.001"), (number(9.9e-4), "9.9e-4"), (number(9999.0), "9999"), (number(1e4), "1.0e4"),
        (duration(59), "59s"), (duration(60), "1m00s"), (duration(3599), "59m59s"), (duration(86_399), "23h59m"),
        (duration(86_400), "1d00h"), (age(9.9), "9.9s ago"), (age(10.0), "10s ago"),
        (duration(7.4), "7s"), (duration(59.6), "1m00s"), (duration(3599.7), "1h00m"), (duration(90_000), "1d01h"),
        (duration(None), "-"), (duration(math.nan), "-"), (duration(-3), "0s"),
        (age(None), "no data"), (age(0.42), "0.4s ago"), (age(75), "1m15s ago"),
        (gib(22_528), "22.0"), (gib(None), "n/a"), (gib(math.nan), "n/a"), (gib(143_360), "140"), (gib(812), "0.8"),
        (memory_text(22_528), "22.0"), (memory_text(812), "812M"), (memory_text(40.2), "40M"), (memory_text(0), "0.0"),
        (memory_text(1023.4), "1023M"), (memory_text(1023.6), "1.0"), (memory_text(None), "n/a"),
        (percent(0.956), "96%"), (percent(None), "n/a"), (learning_rate(0.0099), "9.9e-3"), (learning_rate(None), "-"),
        (clip("abcdef", 4), "abc…"), (clip("ab", 4), "ab"), (fit_cells("道路標識", 5), "道路…"),
        (fit_cells("a", 3), "a  "),
        (ascii_text("4·10 → 6…道"), "4.10 > 6~?"),
        (plural(0, "class"), "0 classes"), (plural(1, "class"), "1 class"), (plural(2, "run"), "2 runs"),
        ("".join(progress(0.5, 5)), "━━╸──"), (ascii_text("".join(progress(None, 3))), "..."),
        (ascii_text("".join(progress(1.7, 3))), "==="),
    ],
)  # fmt: skip
def test_numbers_are_formatted(found: str, wanted: str) -> None:
    assert found == wanted


@given(st.text(max_size=40), st.integers(0, 30))
def test_fitted_text_has_the_requested_width(text: str, width: int) -> None:
    assert cell_len(fit_cells(text, width)) == width
    assert cell_len(clip(text, width)) <= max(width, cell_len(text) if cell_len(text) <= width else 0)


def test_keys_are_unique_and_control_keys_are_marked() -> None:
    names = [name for key in keys.KEYS if key.is_bound and key.keys for name in key.keys.split(",")]
    assert len(names) == len(set(names))
    assert {"app.toggle_pause", "app.edit_setting", "app.undo", "app.checkpoint", "app.stop"} == {
        key.action for key in keys.KEYS if key not in keys.available(keys.KEYS, sends=False)
    }
    assert "space" not in names
