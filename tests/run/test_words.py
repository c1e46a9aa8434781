"""Sizes and first lines; the other words are tested with the screen that shows them."""

from __future__ import annotations

import pytest

from segapp.run.words import first_line, size


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0.0 MiB"), (1.5 * 2**20, "1.5 MiB"), (117 * 2**20, "117 MiB"), (2.25 * 2**30, "2.2 GiB")],
)
def test_sizes(num_bytes: float, text: str) -> None:
    assert size(num_bytes) == text


def test_first_line_is_the_message_or_the_type() -> None:
    assert first_line(ValueError("\n abc\nd")) == "abc"
    assert first_line(ValueError()) == "ValueError"
