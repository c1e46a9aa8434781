"""The color themes: two of segapp's, the terminal's colors, and one with high contrast."""

from typing import Any

from textual.app import App
from textual.theme import BUILTIN_THEMES, Theme

from segapp.errors import ConfigError, accepted_words

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
HIGH_CONTRAST = Theme(
    name="high-contrast",
    primary="#00ffff",
    secondary="#b0b0b0",
    accent="#ff80ff",
    warning="#ffff00",
    error="#ff5050",
    success="#00ff00",
    foreground="#ffffff",
    background="#000000",
    surface="#000000",
    panel="#303030",
    text_alpha=1.0,
    variables={
        "border": "#ffffff",
        "text-muted": "#e0e0e0",
        "text-success": "#00ff00",
        "text-warning": "#ffff00",
        "text-error": "#ff8080",
        "text-primary": "#00ffff",
        "text-accent": "#ff80ff",
    },
)
NAMES = tuple(
    name
    for name in (DARK.name, LIGHT.name, "ansi-dark", "ansi-light", HIGH_CONTRAST.name)
    if name in BUILTIN_THEMES or not name.startswith("ansi-")
)
"""In the order of the theme key; Textual supports the terminal's own colors from version 8.2.5."""


def set_up(app: App[Any], name: str) -> None:
    """Register segapp's themes, and select one by its name; the first if the name is unknown."""
    for own in (DARK, LIGHT, HIGH_CONTRAST):
        app.register_theme(own)
    app.theme = name if name in NAMES else NAMES[0]


_SHORT = {"dark": "segapp-dark", "light": "segapp-light"}


def find_theme(name: str) -> str:
    """Return the theme with a name or abbreviation; raise ConfigError if there is none."""
    name = _SHORT.get(name, name)
    if name not in NAMES:
        raise ConfigError(f"theme {name}: no such theme: {accepted_words(name, [*_SHORT, *NAMES])}")
    return name
