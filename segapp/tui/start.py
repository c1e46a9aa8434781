"""Show a run: check the terminal, read the user's settings, and run the TUI until the user leaves."""

import contextlib
import gc
import os
from collections.abc import Callable
from pathlib import Path

from segapp.errors import RunError
from segapp.run.folder import RunFolder, find_run
from segapp.run.words import printable
from segapp.tui import themes
from segapp.tui.app import MonitorApp
from segapp.tui.panes.header import state_label
from segapp.tui.settings import load_settings, seen_path, settings_path
from segapp.tui.terminal import check_terminal, is_ascii_only, is_hung_up
from segapp.view.source import LiveSource


def run_ui(
    run: Path | str | RunFolder,
    *,
    readonly: bool = False,
    theme: str | None = None,
    ascii_only: bool = False,
    starts_with_list: bool = False,
    has_trainer_ended: Callable[[], bool] | None = None,
) -> int:
    """Show a run until the user leaves; does not affect the training.

    Args:
        run: Name of the run, path to its folder, or the folder of a run that may not have begun yet.
        readonly: Hide and disable all keys that send commands.
        theme: One of `themes.NAMES`, `dark` or `light`; None: the last one used.
        ascii_only: Draw without Unicode; always used if the locale does not support it.
        starts_with_list: Show the list of the runs first.
        has_trainer_ended: For a trainer that is starting: called until it trains; if it returns True, the TUI closes.

    Returns:
        0.

    Raises:
        ConfigError: There is no such run or theme, or there is no terminal.
        RunError: The TUI failed.
    """
    folder = run if isinstance(run, RunFolder) else find_run(run)
    file = settings_path()
    settings = load_settings(file)
    if theme is not None:
        settings.theme = themes.find_theme(theme)
    check_terminal()
    app = MonitorApp(
        LiveSource(folder),
        readonly=readonly,
        starts_with_list=starts_with_list,
        settings=settings,
        settings_file=file,
        seen_file=seen_path(),
        ascii_only=ascii_only or is_ascii_only(),
        has_trainer_ended=has_trainer_ended,
    )
    _lower_priority()
    collect_rarely()
    app.run(mouse=True)
    if app.return_code:
        what = f"{type(app.failure).__name__}: {app.failure}" if app.failure is not None else "no reason known"
        raise RunError(
            f"the TUI failed ({printable(what)[:200]}); the training continues: `segapp status` and `segapp ctl` work"
        ) from app.failure
    if not is_hung_up():
        status = app.status()
        how = state_label(status) if status.is_over else "the training continues"
        with contextlib.suppress(OSError):
            again = f"segapp attach {printable(app.shown.source.folder.argument)}"
            print(f"left {app.shown.name} ({how}); to see it again: {again}")
    return 0


def collect_rarely() -> None:
    """Exclude loaded objects from garbage collection, and collect rarely, because updates make hardly any cycles."""
    gc.freeze()
    gc.set_threshold(20_000)


def _lower_priority() -> None:
    """Use the batch scheduling policy, so that the TUI does not preempt a thread of a training step."""
    with contextlib.suppress(AttributeError, OSError):  # only Linux has this policy
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
