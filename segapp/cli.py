"""The command line: one function a command; heavy imports inside, so that `segapp --help` answers at once."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer

from segapp.errors import ConfigError, SegappError

app = typer.Typer(
    name="segapp",
    help="Train, evaluate and use semantic-segmentation networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_STORAGE_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO, errno.EFBIG}
_NAME_ERRNOS = {errno.ENAMETOOLONG, errno.ELOOP, errno.EACCES, errno.EPERM}

ConfigOption = Annotated[str | None, typer.Option("--config", metavar="FILE", help="A path, or the name of a config.")]
WeightsConfigOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--config", metavar="FILE", help="For bare weights: the config of the network they are of."),
]
RunOption = Annotated[Optional[Path], typer.Option("--run", metavar="DIR", help="Folder of the run.")]  # noqa: UP045
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
_COMMANDS = "set gpu0_bsz=3 | set shares=2,3,3 | set lr_factor=0.5 | pause | resume | checkpoint | stop | cancel [ID]"
Overrides = Annotated[Optional[list[str]], typer.Argument(metavar="[KEY=VALUE]...", help="Dotted config keys.")]  # noqa: UP045


def main(arguments: list[str] | None = None) -> None:
    """Runs segapp with the process's arguments (or those given) and exits."""
    _open_closed_streams()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["__complete"]:
        _complete(arguments[1:])
    arguments = _with_resume_value(arguments)
    is_debug = "--debug" in arguments
    with _one_line_errors(is_debug):
        app([argument for argument in arguments if argument != "--debug"], standalone_mode=True)


def _complete(asked: list[str]) -> NoReturn:
    """Answers a shell's completion script; whatever goes wrong, a person at a prompt must not see it."""
    from segapp.completion import answer

    with contextlib.suppress(Exception):
        for line in answer(typer.main.get_command(app), asked):
            print(line)
    sys.exit(0)


def _open_closed_streams() -> None:
    """Standard streams that were closed (`>&-`) lead nowhere: else the next file opened would take their place."""
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(fd, "w" if fd else "r", closefd=False))  # noqa: SIM115


def _with_resume_value(arguments: list[str]) -> list[str]:
    """`--resume` may stand without a value: then it means auto."""
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
    """For imports: what they make stays, and looking through it for garbage costs a tenth of their time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def _one_line_errors(is_debug: bool) -> Iterator[None]:
    """Turns what a user can act on into one line on stderr and the exit code of the contract."""
    try:
        yield
    except SegappError as error:
        if is_debug:
            raise
        _fail(str(error), error.exit_code)
    except OSError as error:
        if is_debug or error.errno not in _STORAGE_ERRNOS | _NAME_ERRNOS:
            raise
        if error.errno in _NAME_ERRNOS:
            name = str(error.filename or "a file")
            _fail(f"{name[:100]}{'...' if len(name) > 100 else ''}: {error.strerror}: name another", 2)
        _fail(f"{error.filename or 'disk'}: {error.strerror}: free space or choose another folder", 10)
    except KeyboardInterrupt:
        sys.exit(130)


def _fail(message: str, code: int) -> None:
    from segapp.run.text import printable

    lines = "\n".join(printable(line) for line in message.splitlines())
    print(f"error: {lines}", file=sys.stderr, flush=True)
    sys.exit(code)


def _version(value: bool) -> None:
    if value:
        from segapp import __version__

        print(f"segapp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigOption = None,
    run: RunOption = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(
            "--resume", metavar="[auto|RUN|FILE]", help="Go on: the run's last good checkpoint, or the one named."
        ),
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Train in the foreground and print lines.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background; segapp attach shows it.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the complete config and leave.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Try a few steps on the data there, and say what the whole run would need.")
    ] = False,
    json_out: Annotated[bool, typer.Option("--json", help="With --smoke: print JSON.")] = False,
) -> None:
    """Train a network.

    The run lies in runs/NAME (or --run DIR). In a terminal the training is a process of its own and a screen shows it;
    leaving the screen does not stop it. Without a terminal, or with --plain, it runs in the foreground: Ctrl-C saves
    and leaves with exit code 75. --resume goes on, bit for bit. --smoke trains, evaluates, saves and resumes with a few
    images in a folder that is removed, and reports time, memory and disk of the whole run.
    """
    _ignore_early_signals()
    if plain and detach:
        raise ConfigError("--plain trains in the foreground and --detach in the background: use one of them")
    if smoke and (resume is not None or detach):
        raise ConfigError("--smoke tries a new training in the foreground: leave --resume and --detach out")
    if json_out and not smoke:
        raise ConfigError("--json belongs to --smoke: add it, or ask a run with segapp status RUN --json")
    from segapp.config import dump_config
    from segapp.train.request import plan_request

    plan = plan_request(config, overrides or [], run, resume)
    if print_config:
        print(dump_config(plan.config), end="")
        return
    if smoke:
        from segapp.commands import smoke as trial

        sys.exit(trial.smoke(plan, config or "FILE", as_json=json_out))
    from segapp.commands.spawn import is_interactive, spawn_trainer, wait_for_start

    if detach or (not plain and is_interactive()):
        trainer = spawn_trainer(plan, config=config, resume=resume, overrides=overrides or [])
        code = wait_for_start(trainer, is_detached=detach)
        if code is None:
            from segapp.tui.app import run_ui

            run_ui(trainer.folder.path)
            code = trainer.after_screen()
        sys.exit(code)
    from segapp.train.session import run_session

    sys.exit(run_session(plan, _with_resume_value(sys.argv[1:])))


def _ignore_early_signals() -> None:
    """A hang-up, or a wish for a checkpoint or for stacks, must not end a training that still imports its libraries."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@app.command()
def attach(
    run: Annotated[
        Optional[str],  # noqa: UP045
        typer.Argument(metavar="[RUN]", help="A run's name or folder; else the newest that trains, else the newest."),
    ] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="Watch only.")] = False,
    replay: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--replay", metavar="SPEED", help="Play the run again, so many times as fast as it was."),
    ] = None,
    theme: Annotated[Optional[str], typer.Option(metavar="NAME", help="Colours of the screen.")] = None,  # noqa: UP045
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
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help=_COMMANDS)],
    after_epoch: Annotated[bool, typer.Option("--after-epoch", help="stop: at the end of this epoch.")] = False,
    force: Annotated[bool, typer.Option("--force", help="set: also a split that is not expected to fit.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the answer; exit code 1 unless applied.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="Wait so many seconds at most; 0: no limit.")] = 0.0,
) -> None:
    """Steer a running training."""
    from segapp.commands.control import control_run

    code = control_run(run, words, after_epoch=after_epoch, force=force, wait=wait, timeout_s=timeout)
    sys.exit(code)


@app.command("eval")
def evaluate(
    target: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's name or folder, a checkpoint, or weights.")
    ],
    split: Annotated[str, typer.Option(help="Split of the data set.")] = "val",
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the result as JSON.")] = None,
    slide: Annotated[bool, typer.Option("--slide", help="Sliding window instead of the whole image.")] = False,
    tta: Annotated[bool, typer.Option("--tta", help="Average over a flip and several scales.")] = False,
    data_root: Annotated[Optional[str], typer.Option(metavar="DIR", help="Data set folder, if it has moved.")] = None,  # noqa: UP045
    boundary: Annotated[bool, typer.Option("--boundary", help="Give the boundary IoU too.")] = False,
    per_image: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--per-image", metavar="FILE.csv", help="Write the scores of every image."),
    ] = None,
    confusion: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--confusion", metavar="FILE.png|.svg", help="Draw the confusion matrix."),
    ] = None,
    devices: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--devices", metavar="LIST", help="Share the images over devices, e.g. 0,1 or cpu,cpu."),
    ] = None,
    config: WeightsConfigOption = None,
) -> None:
    """Evaluate a run's best checkpoint, or the one named, or with --config any file of weights."""
    from segapp.commands.evaluate import EvalOptions, evaluate_target

    files = {"json_file": json_file, "per_image": per_image, "confusion": confusion}
    evaluate_target(target, EvalOptions(split, slide, tta, data_root, boundary, devices, **files, config=config))


@app.command()
def predict(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|CHECKPOINT|FILE", help="A run's name or folder, a checkpoint, weights, or an exported file."
        ),
    ],
    paths: Annotated[list[Path], typer.Argument(metavar="PATH...", help="Images, videos, folders, or globs.")],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the pictures go.")],
    save: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            "--save",
            metavar="KIND",
            help="labels, color, overlay, probabilities; several with commas, or again. [default: all but the last]",
        ),
    ] = None,
    label_ids: Annotated[
        bool, typer.Option("--label-ids", help="Write the data set's own ids (Cityscapes labelIds).")
    ] = False,
    slide: Annotated[bool, typer.Option("--slide", help="Sliding window instead of the whole image.")] = False,
    tta: Annotated[bool, typer.Option("--tta", help="Average over a flip and several scales.")] = False,
    batch: Annotated[str, typer.Option("--batch", metavar="N|auto", help="Images at once; auto: by memory.")] = "auto",
    config: WeightsConfigOption = None,
) -> None:
    """Predict images and videos: DIR/labels (class ids), DIR/color, DIR/overlay, DIR/probabilities."""
    from segapp.commands.predict import PredictOptions, parse_batch, predict_target
    from segapp.inference.predict import parse_saved

    options = PredictOptions(parse_saved(save or []), label_ids, slide, tta, parse_batch(batch), config)
    predict_target(target, paths, out, options)


@app.command()
def export(
    target: Annotated[
        str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's name or folder, a checkpoint, or weights.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The file to write.")],
    format: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--format", metavar="onnx|pt2|safetensors", help="Else by the ending of --out."),
    ] = None,
    half: Annotated[bool, typer.Option("--half", help="Weights and arithmetic in float16.")] = False,
    argmax: Annotated[bool, typer.Option("--argmax", help="Give class ids instead of logits.")] = False,
    config: WeightsConfigOption = None,
) -> None:
    """Write a network as a file that runs without segapp, and check its answers; or its bare weights.

    The file takes uint8 RGB images (batch, height, width, 3) of any size and gives float32 logits at that size;
    normalisation, padding and upsampling are inside, class names and colours in its metadata. safetensors holds the
    weights alone, under the names of the network's own library, with the same metadata.
    """
    from segapp.commands.export import export_target

    export_target(target, out, format=format, half=half, argmax=argmax, config=config)


@app.command()
def check(
    overrides: Overrides = None,
    config: ConfigOption = None,
    json_out: JsonFlag = False,
    html_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write a page with pictures of what was found."),
    ] = None,
    sums_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--sums", metavar="FILE", help="Compare every file with this list of sha256 sums."),
    ] = None,
    new_sums_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--write-sums", metavar="FILE", help="Write that list, as sha256sum does."),
    ] = None,
) -> None:
    """Examine the data: every file read, every id checked, images seen twice. Exit code 3 if something is wrong."""
    from segapp.config import load_config

    if config is None:
        raise ConfigError("--config FILE is missing: name a config, e.g. --config demo.yaml")
    loaded = load_config(config, overrides or [])
    from segapp.commands.check import check_data

    sys.exit(
        check_data(loaded, as_json=json_out, html_file=html_file, sums_file=sums_file, new_sums_file=new_sums_file)
    )


@app.command()
def init(
    root: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the images and their masks.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE", help="The config; NAME.yaml here, after the folder, if not given."),
    ] = None,
    val_share: Annotated[
        Optional[float],  # noqa: UP045
        typer.Option("--val-share", metavar="SHARE", help="No splits there? Write train.txt and val.txt, e.g. 0.15."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the file.")] = False,
) -> None:
    """Look at a data folder and write a config for it, each choice with its reason."""
    from segapp.commands.init import propose_config

    written = propose_config(root, out, val_share=val_share, force=force)
    print(f"written: {written}\nnext: segapp check --config {written}; segapp train --config {written}")


@app.command()
def report(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    out: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--out", metavar="FILE", help="Where to write it; report.html in the run's folder if not given."),
    ] = None,
    split: Annotated[str, typer.Option("--split", help="Split for the confusion matrix and the pictures.")] = "val",
    worst: Annotated[int, typer.Option("--worst", min=0, help="How many images to show, the worst first.")] = 8,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Only what the run has written: no model, no data.")
    ] = False,
) -> None:
    """Write a run's report: one HTML file with curves, classes, confusion matrix, worst images, memory, settings."""
    from segapp.report import write_report

    written = write_report(run, out, split=split, num_worst=worst, has_pictures=not no_images)
    print(f"written: {written} ({written.stat().st_size / 2**20:.1f} MiB)")


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Names or folders.")],
    html_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--html", metavar="FILE", help="Write a page with the curves."),
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """Compare runs: results, speed, memory, and what differs in their configs."""
    import json

    from segapp.report.compare import compare_runs, print_comparison

    found = compare_runs(runs, html_file)
    if json_out:
        print(json.dumps(found, indent=2))
    else:
        print_comparison(found)


@app.command("ls")
def list_runs(json_out: JsonFlag = False) -> None:
    """List the runs under runs/."""
    from segapp.commands import runs as overview

    overview.print_runs(Path("runs"), as_json=json_out)


@app.command()
def status(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")],
    json_out: JsonFlag = False,
) -> None:
    """Show how a run stands."""
    from segapp.commands import runs as overview

    overview.print_status(run, as_json=json_out)


ckpt = typer.Typer(help="What can be resumed.", no_args_is_help=True)
app.add_typer(ckpt, name="ckpt")


@ckpt.command("list")
def ckpt_list(run: Annotated[str, typer.Argument(metavar="RUN")], json_out: JsonFlag = False) -> None:
    """List a run's committed checkpoints, newest first."""
    from segapp.commands import runs as overview

    overview.print_checkpoints(run, as_json=json_out, hashes=False)


@ckpt.command("verify")
def ckpt_verify(run: Annotated[str, typer.Argument(metavar="RUN")], json_out: JsonFlag = False) -> None:
    """Read every byte of a run's checkpoints; exit code 4 if one is damaged."""
    from segapp.commands import runs as overview

    sys.exit(overview.print_checkpoints(run, as_json=json_out, hashes=True))


@app.command()
def schema(
    out: Annotated[Optional[Path], typer.Option("--out", metavar="FILE", help="Write it there instead.")] = None,  # noqa: UP045
) -> None:
    """Print the JSON schema of a config file, for editors."""
    import json

    from segapp.config import config_schema

    text = json.dumps(config_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {os.strerror(error.errno or 0)}: choose another --out") from None


@app.command()
def completion(
    shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")],
) -> None:
    """Print the script that completes commands, options, config keys, runs and configs in a shell."""
    from segapp.completion import completion_script

    print(completion_script(shell), end="")


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    gpus: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--gpus", metavar="LIST", help="3x24220MiB, or 24GiB,24GiB,11GiB, or here (this machine's)."),
    ] = None,
    run: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--run", metavar="RUN", help="Calibrate with what this run has measured."),
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """Predict each GPU's peak memory for every split of the batch, without a GPU."""
    from segapp.commands.plan import print_plan

    print_plan(config, overrides or [], gpus, run, as_json=json_out)


@app.command()
def profile(
    overrides: Overrides = None,
    config: ConfigOption = None,
    steps: Annotated[int, typer.Option("--steps", metavar="N", min=1, help="Steps to time.")] = 3,
    json_out: JsonFlag = False,
) -> None:
    """Run a few real steps and show where their time and memory go."""
    from segapp.commands.profile import print_profile

    print_profile(config, overrides or [], steps, as_json=json_out)
