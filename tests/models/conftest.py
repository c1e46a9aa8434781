"""Networks that are built without a look at what they accept."""

import pytest


@pytest.fixture
def _uninspected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the inspection, which takes most of a build; the networks of these tests have no unused parts."""
    monkeypatch.setattr("segapp.models.by_name.inspect_model", lambda model, key: None)
