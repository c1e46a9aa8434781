"""Mutated folders of every converter are converted or refused, within 1 GiB of memory and 20 s."""

from __future__ import annotations

import pytest

from tests.fuzz.converters import SAMPLES, convert_mutations
from tests.support.limits import outcome


@pytest.mark.parametrize("title", SAMPLES)
def test_mutated_folder_is_converted_or_refused(title: str) -> None:
    assert outcome(convert_mutations, title, range(10), limit_s=200.0) == ("done", [])


@pytest.mark.slow
@pytest.mark.parametrize("title", SAMPLES)
def test_many_mutated_folders_are_converted_or_refused(title: str) -> None:
    for first in range(1000, 1400, 20):
        assert outcome(convert_mutations, title, range(first, first + 20), limit_s=400.0) == ("done", [])
