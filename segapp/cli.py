"""The command line: one function a command, one parameter an option.

Functions here take as many parameters as their command has options; what they call gets a dataclass or few arguments.
Heavy imports are inside the functions, so that `segapp --help` answers at once.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from segapp.commands import init_options
from segapp.errors import ConfigError, cannot_be_written

app = typer.Typer(
    name="segapp",
    help="Train, evaluate and use semantic-segmentation networks.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _option(flag: str, help: str, metavar: str = "FILE") -> Any:
    return typer.Option(flag, metavar=metavar, help=help)


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted config keys.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")]
Target = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's name or folder, a checkpoint, or weights.")
]
ConfigOption = Annotated[str | None, _option("--config", "A path, or the name of a config.")]
WeightsConfig = Annotated[str | None, _option("--config", "For bare weights: the config of their network.")]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder of the run.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SplitOption = Annotated[
    str | None, _option("--split", "Split to evaluate; by default the run's own for validation.", "NAME")
]
SlideFlag = Annotated[bool, typer.Option("--slide", help="Sliding window instead of the whole image.")]
TtaFlag = Annotated[bool, typer.Option("--tta", help="Average over a flip and several scales.")]
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
        str | None,
        _option("--resume", "Continue from the run's last good checkpoint, or from the one named.", "[auto|RUN|FILE]"),
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
    from segapp.config import dump_config
    from segapp.train.request import plan_request

    request = plan_request(config, overrides or [], run, resume)
    if print_config:
        print(dump_config(request.config), end="")
        return
    if smoke:
        from segapp.commands.smoke import run_smoke

        sys.exit(run_smoke(request, config or "FILE", as_json=json_out))
    from segapp.commands.spawn import is_interactive, spawn_trainer, wait_for_start

    if detach or (not plain and is_interactive()):
        trainer = spawn_trainer(request, config=config, resume=resume, overrides=overrides or [])
        code = wait_for_start(trainer, is_detached=detach)
        if code is None:
            from segapp.tui.app import run_ui

            run_ui(trainer.folder.path)
            code = trainer.after_screen()
        sys.exit(code)
    from segapp.train.session import run_session

    sys.exit(run_session(request, with_resume_value(sys.argv[1:])))


def _ignore_early_signals() -> None:
    """Ignore SIGHUP, SIGUSR1 and SIGUSR2 until the trainer handles them: their default ends the process."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@app.command()
def attach(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run's name or folder; else the newest that trains, else the newest."),
    ] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="Show only; send no commands.")] = False,
    replay: Annotated[
        float | None, _option("--replay", "Play the run again at SPEED times its speed.", "SPEED")
    ] = None,
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


@app.command("eval")
def evaluate(
    target: Target,
    split: SplitOption = None,
    json_file: Annotated[Path | None, _option("--json", "Write the result as JSON.")] = None,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    data_root: Annotated[str | None, typer.Option(metavar="DIR", help="Data set folder, if it has moved.")] = None,
    boundary: Annotated[bool, typer.Option("--boundary", help="Compute the boundary IoU too.")] = False,
    per_image: Annotated[Path | None, _option("--per-image", "Write the scores of every image.", "FILE.csv")] = None,
    confusion: Annotated[Path | None, _option("--confusion", "Draw the confusion matrix.", "FILE.png|.svg")] = None,
    devices: Annotated[
        str | None, _option("--devices", "Share the images over devices, e.g. 0,1 or cpu,cpu.", "LIST")
    ] = None,
    config: WeightsConfig = None,
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
    out: Annotated[Path, _option("--out", "Folder for the results.", "DIR")],
    save: Annotated[
        list[str] | None,
        typer.Option(
            "--save",
            metavar="KIND",
            help="labels, color, overlay, probabilities; several with commas, or again. [default: all but the last]",
        ),
    ] = None,
    label_ids: Annotated[
        bool, typer.Option("--label-ids", help="Write the data set's own ids (Cityscapes labelIds).")
    ] = False,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    batch: Annotated[str, typer.Option("--batch", metavar="N|auto", help="Images at once; auto: by memory.")] = "auto",
    config: WeightsConfig = None,
) -> None:
    """Predict images and videos: DIR/labels (class ids), DIR/color, DIR/overlay, DIR/probabilities."""
    from segapp.commands.predict import PredictOptions, parse_batch, predict_target
    from segapp.inference.predict import parse_saved

    options = PredictOptions(parse_saved(save or []), label_ids, slide, tta, parse_batch(batch), config)
    predict_target(target, paths, out, options)


@app.command()
def export(
    target: Target,
    out: Annotated[Path, _option("--out", "The file to write.")],
    format: Annotated[str | None, _option("--format", "Else by the ending of --out.", "onnx|pt2|safetensors")] = None,
    half: Annotated[bool, typer.Option("--half", help="Weights and arithmetic in float16.")] = False,
    argmax: Annotated[bool, typer.Option("--argmax", help="Give class ids instead of logits.")] = False,
    config: WeightsConfig = None,
) -> None:
    """Write a network as a file that runs without segapp, and compare its output; or write its weights alone.

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
    html_file: Annotated[Path | None, _option("--html", "Write a page with pictures of what was found.")] = None,
    sums_file: Annotated[Path | None, _option("--sums", "Compare every file with this list of sha256 sums.")] = None,
    new_sums_file: Annotated[Path | None, _option("--write-sums", "Write that list, as sha256sum does.")] = None,
) -> None:
    """Examine the data: every file, every id, duplicate images. Exit code 3 if something is wrong."""
    from segapp.config import load_config

    if config is None:
        raise ConfigError("--config FILE is missing: name a config, e.g. --config demo.yaml")
    loaded = load_config(config, overrides or [])
    from segapp.commands.check import check_data

    sys.exit(
        check_data(loaded, as_json=json_out, html_file=html_file, sums_file=sums_file, new_sums_file=new_sums_file)
    )


@app.command()
def doctor(json_out: JsonFlag = False) -> None:
    """Show what this machine offers for training, what is missing, and the command that installs it.

    Exit code 1 if something is missing without which training with default settings fails.
    """
    from segapp.commands.doctor import print_doctor

    sys.exit(print_doctor(as_json=json_out))


@app.command()
def init(
    root: init_options.Root,
    out: init_options.Out = None,
    layout: init_options.Layout = None,
    val_share: init_options.ValShare = None,
    group: init_options.Group = None,
    folds: init_options.Folds = None,
    seed: init_options.Seed = 0,
    html_file: init_options.Page = None,
    clean_masks: init_options.CleanMasks = False,
    force: init_options.Force = False,
) -> None:
    """Write a config for a data folder, each choice with its reason; the folder itself stays as it is."""
    from segapp.commands.init import InitRequest
    from segapp.commands.init.dialog import init_folder

    init_folder(InitRequest(root, out, force, layout, val_share, group, folds, seed, html_file, clean_masks))


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, _option("--out", "File to write; by default report.html in the run folder.")] = None,
    split: SplitOption = None,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Number of images to show, the worst first.")] = 8,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Use the events of the run alone: no model, no data.")
    ] = False,
) -> None:
    """Write a run's report: one HTML file with curves, classes, confusion matrix, worst images, memory, settings."""
    from segapp.report import write_report

    written = write_report(run, out, split=split, num_worst=worst, has_pictures=not no_images)
    print(f"written: {written} ({written.stat().st_size / 2**20:.1f} MiB)")


@app.command()
def compare(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Names or folders.")],
    html_file: Annotated[Path | None, _option("--html", "Write a page with the curves.")] = None,
    json_out: JsonFlag = False,
) -> None:
    """Compare runs: results, speed, memory, and the differences of their configs."""
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
def status(run: RunArgument, json_out: JsonFlag = False) -> None:
    """Show the state and progress of a run."""
    from segapp.commands import runs as overview

    overview.print_status(run, as_json=json_out)


ckpt = typer.Typer(help="Checkpoints that can be resumed.", no_args_is_help=True)
app.add_typer(ckpt, name="ckpt")


@ckpt.command("list")
def ckpt_list(run: RunArgument, json_out: JsonFlag = False) -> None:
    """List a run's committed checkpoints, newest first."""
    from segapp.commands import runs as overview

    overview.print_checkpoints(run, as_json=json_out, hashes=False)


@ckpt.command("verify")
def ckpt_verify(run: RunArgument, json_out: JsonFlag = False) -> None:
    """Read every byte of a run's checkpoints; exit code 4 if one is damaged."""
    from segapp.commands import runs as overview

    sys.exit(overview.print_checkpoints(run, as_json=json_out, hashes=True))


@app.command()
def schema(out: Annotated[Path | None, _option("--out", "Write it to this file instead.")] = None) -> None:
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
        raise ConfigError(cannot_be_written(out, error)) from None


@app.command()
def completion(shell: Annotated[str, typer.Argument(metavar="SHELL", help="bash, zsh or fish.")]) -> None:
    """Print the script that completes commands, options, config keys, runs and configs in a shell."""
    from segapp.completion import completion_script

    print(completion_script(shell), end="")


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    gpus: Annotated[
        str | None, _option("--gpus", "3x24220MiB, or 24GiB,24GiB,11GiB, or here (this machine's).", "LIST")
    ] = None,
    run: Annotated[str | None, _option("--run", "Calibrate with the memory that this run has measured.", "RUN")] = None,
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
