"""Commands of a training: train, sweep, attach, ctl."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from segapp.cli.options import ConfigOption, Overrides, RunArgument, RunOption, app, option
from segapp.errors import ConfigError

_COMMANDS = "set gpu0_bsz=3 | set shares=2,3,3 | set lr_factor=0.5 | pause | resume | checkpoint | stop | cancel [ID]"


def with_resume_value(arguments: list[str]) -> list[str]:
    """Return the arguments with `auto` behind a `--resume` that has no value."""
    if "--resume" not in arguments:
        return arguments
    at = arguments.index("--resume")
    following = arguments[at + 1] if at + 1 < len(arguments) else None
    is_value = (
        following is not None and not following.startswith("-") and ("=" not in following or Path(following).exists())
    )
    return arguments if is_value else [*arguments[: at + 1], "auto", *arguments[at + 1 :]]


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    """Switch garbage collection off for imports: their objects stay, and collection takes a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigOption = None,
    run: RunOption = None,
    resume: Annotated[
        str | None,
        option("--resume", "Continue from the run's last good checkpoint, or from the one named.", "[auto|RUN|FILE]"),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Train in the foreground and print lines.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background; segapp attach shows it.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete config and exit.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a few steps on the real data and print what the whole run would need.")
    ] = False,
    json_out: Annotated[bool, typer.Option("--json", help="With --smoke: print JSON.")] = False,
) -> None:
    """Train a network.

    The run folder is runs/NAME (or --run DIR). In a terminal, the training is a process of its own, which goes on when
    its screen is left. Without a terminal, or with --plain, it runs in the foreground: Ctrl-C saves and exits with code
    75. --resume continues bit for bit. --smoke trains, evaluates, saves and resumes with a few images in a temporary
    folder, and reports time, memory and disk space of the whole run.
    """
    _ignore_early_signals()
    if plain and detach:
        raise ConfigError("--plain trains in the foreground and --detach in the background: use one of them")
    if smoke and (resume is not None or detach):
        raise ConfigError("--smoke tries a new training in the foreground: leave --resume and --detach out")
    if json_out and not smoke:
        raise ConfigError("--json belongs to --smoke: add it, or ask a run with segapp status RUN --json")
    with _no_collection():
        from segapp.config import explain_config
        from segapp.training.request import plan_request

    request = plan_request(config, overrides or [], run, resume)
    if print_config:
        print(explain_config(request.config), end="")
        return
    if smoke:
        from segapp.commands.smoke import run_smoke

        sys.exit(run_smoke(request, config or "FILE", as_json=json_out))
    from segapp.commands.spawn import is_interactive, show_training, spawn_trainer, wait_for_start

    if detach or (not plain and is_interactive()):
        trainer = spawn_trainer(request, config=config, resume=resume, overrides=overrides or [])
        if detach:
            sys.exit(wait_for_start(trainer))
        with _no_collection():
            import segapp.tui.app  # noqa: F401
        sys.exit(show_training(trainer))
    from segapp.run.starting import announce, outlast_readers

    outlast_readers()
    if not sys.stderr.isatty():
        announce("importing torch")  # on a terminal, every command says it
    from segapp.training.session import run_session

    sys.exit(run_session(request, with_resume_value(sys.argv[1:])))


def _ignore_early_signals() -> None:
    """Ignore SIGHUP, SIGUSR1 and SIGUSR2 until the trainer handles them: their default ends the process."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@app.command()
def sweep(
    overrides: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SWEEP] [KEY=VALUES]...", help="Values: A,B,C or a range of whole numbers 0..4."),
    ] = None,
    config: Annotated[
        list[str] | None, option("--config", "A path, the name of a config, or a glob; again for several (folds).")
    ] = None,
    devices: Annotated[
        str | None, option("--devices", "One training on each: 0,1 or 0+1,2+3 or cpu,cpu.", "LIST")
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Train failed runs again.")] = False,
    report: Annotated[bool, typer.Option("--report", help="Train nothing; write the page.")] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print the results as JSON at the end.")] = False,
) -> None:
    """Train every combination of settings, each a run runs/SWEEP/RUN, and compare them on one page, sweep.html.

    The same command again, or segapp sweep SWEEP, continues what was stopped; further values or keys add runs. Ctrl-C
    stops at the next safe point with a checkpoint and exits with code 75. A failed run does not stop the others: exit
    code 1.
    """
    _ignore_early_signals()
    from segapp.commands.sweep import SweepOptions, run_sweep

    sys.exit(run_sweep(overrides or [], SweepOptions(config or [], devices, retry, report, json_out)))


@app.command()
def attach(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's name or folder; else the newest that trains, else the newest."),
    ] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="Show only; send no commands.")] = False,
    replay: Annotated[float | None, option("--replay", "Play the run again at SPEED times its speed.", "SPEED")] = None,
    theme: Annotated[str | None, typer.Option(metavar="NAME", help="Colours of the screen.")] = None,
    ascii_only: Annotated[bool, typer.Option("--ascii", help="Draw without Unicode.")] = False,
) -> None:
    """Show a run on the screen, past and live; leaving does not stop it."""
    with _no_collection():
        from segapp.commands.control import run_to_attach
        from segapp.tui.app import run_ui

    folder = run_to_attach(run)
    sys.exit(run_ui(folder.path, readonly=readonly, replay=replay, theme=theme, ascii_only=ascii_only))


@app.command()
def ctl(
    run: RunArgument,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help=_COMMANDS)],
    after_epoch: Annotated[bool, typer.Option("--after-epoch", help="stop: at the end of this epoch.")] = False,
    force: Annotated[bool, typer.Option("--force", help="set: also a split that is not expected to fit.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer; exit code 1 unless applied.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="Longest wait in seconds; 0: no limit.")] = 0.0,
) -> None:
    """Send a command to a running training."""
    from segapp.commands.control import control_run

    code = control_run(run, words, after_epoch=after_epoch, force=force, wait=wait, timeout_s=timeout)
    sys.exit(code)
