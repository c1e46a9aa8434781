"""The color themes, and the settings that the TUI keeps between sessions, which users may edit."""

import contextlib
import json
import os
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from textual.app import App
from textual.theme import BUILTIN_THEMES, Theme

from segapp.errors import ConfigError, accepted_words
from segapp.run.files import write_atomic
from segapp.tui.chart import AUTO
from segapp.tui.classes import SORTS
from segapp.view.history import SMOOTHINGS

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
THEMES = tuple(
    name
    for name in (DARK.name, LIGHT.name, "ansi-dark", "ansi-light", HIGH_CONTRAST.name)
    if name in BUILTIN_THEMES or not name.startswith("ansi-")
)
"""In the order of the theme key; Textual supports the terminal's own colors from version 8.2.5."""


def set_up_themes(app: App[Any], name: str) -> None:
    """Register segapp's themes, and select one by its name; the first if the name is unknown."""
    for own in (DARK, LIGHT, HIGH_CONTRAST):
        app.register_theme(own)
    app.theme = name if name in THEMES else THEMES[0]


_SHORT = {"dark": "segapp-dark", "light": "segapp-light"}


def find_theme(name: str) -> str:
    """Return the theme with a name or abbreviation; raise ConfigError if there is none."""
    name = _SHORT.get(name, name)
    if name not in THEMES:
        raise ConfigError(f"theme {name}: no such theme: {accepted_words(name, [*_SHORT, *THEMES])}")
    return name


Choice = TypeVar("Choice")

CHOICES: dict[str, tuple[Any, ...]] = {
    "smoothing": (AUTO, *reversed(SMOOTHINGS), 0.0),
    "is_log": (False, True),
    "notify": ("off", "bell"),
    "sort": SORTS,
}


def next_choice(choices: tuple[Choice, ...], current: Choice) -> Choice:
    """Return the choice after the current one; the first after the last."""
    index = choices.index(current) if current in choices else -1
    return choices[(index + 1) % len(choices)]


@dataclass
class UiSettings:
    """The settings of the TUI."""

    theme: str = "segapp-dark"
    smoothing: float = AUTO
    is_log: bool = False
    sort: str = "worst"
    notify: str = "bell"
    """How the end of a run and an alert are announced: `off` or `bell`."""
    keymap: dict[str, str] = field(default_factory=dict)
    """Keys that replace the defaults: `toggle_pause = "p"`."""


def settings_path() -> Path:
    """Return the path of the settings file."""
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "segapp" / "ui.toml"


def load_settings(path: Path) -> UiSettings:
    """Return the settings in a file; missing, damaged or invalid ones have their defaults."""
    settings = UiSettings()
    try:
        raw = tomllib.loads(path.read_text())
    except (OSError, ValueError):
        return settings
    for name, choices in CHOICES.items():
        value = raw.get(name)
        if type(value) is type(getattr(settings, name)) and value in choices:
            setattr(settings, name, value)
    if isinstance(raw.get("theme"), str):
        settings.theme = raw["theme"]
    keymap = raw.get("keymap")
    if isinstance(keymap, dict):
        settings.keymap = {str(k): v for k, v in keymap.items() if isinstance(v, str) and v}
    return settings


def save_settings(path: Path, settings: UiSettings) -> None:
    """Write the settings; ignore errors."""
    lines = [f"{name} = {_toml(value)}" for name, value in vars(settings).items() if name != "keymap"]
    if settings.keymap:
        lines += ["", "[keymap]", *(f"{_toml(k)} = {_toml(v)}" for k, v in settings.keymap.items())]
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, "\n".join(lines) + "\n")


def _toml(value: Any) -> str:
    """Return a string, number or boolean as TOML: JSON, but without escaped surrogate pairs."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
