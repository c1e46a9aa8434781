"""The color themes of segapp; the command palette offers Textual's, too."""

from typing import Any

from textual.app import App
from textual.constants import DEFAULT_THEME
from textual.theme import Theme

DARK = Theme(
    name="segapp-dark",
    primary="#5aa9e6",
    secondary="#3f7f8f",
    accent="#c792ea",
    warning="#f2b84b",
    error="#ff6b6b",
    success="#7bd88f",
    foreground="#d8dee9",
    background="#0f1419",
    surface="#0f1419",
    panel="#1b232c",
    variables={"border": "#3b4754", "text-muted": "#8593a1"},
)
LIGHT = Theme(
    name="segapp-light",
    primary="#0b62a8",
    secondary="#4d98a8",
    accent="#7b3fa0",
    warning="#9a5b00",
    error="#b3261e",
    success="#1c7a35",
    foreground="#1c2329",
    background="#fafafa",
    surface="#fafafa",
    panel="#e4e8ec",
    dark=False,
    variables={"border": "#a8b2bc", "text-muted": "#66727d"},
)


def set_up_themes(app: App[Any]) -> None:
    """Register segapp's themes, and select the dark one unless the environment names another for Textual."""
    for own in (DARK, LIGHT):
        app.register_theme(own)
    is_named = DEFAULT_THEME != "textual-dark" and DEFAULT_THEME in app.available_themes
    app.theme = DEFAULT_THEME if is_named else DARK.name
