"""The command line: one function per command, one parameter per option, in the order of the help.

A function here has as many parameters as its command has options; the functions that it calls get a dataclass or a few
arguments. Heavy imports are inside the functions, so that `segapp --help` is fast.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from segapp.errors import ConfigError, storage_errors

app = typer.Typer(
    name="segapp",
    help="Train, evaluate and use semantic segmentation models.\n\nEvery command accepts --debug, which prints the "
    "traceback of an error, and --trust-parts, which runs the custom code that a config names.",
    invoke_without_command=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def option(flag: str, help: str, metavar: str = "FILE", **options: Any) -> Any:
    return typer.Option(flag, metavar=metavar, help=help, **options)


Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Config keys to change, e.g. optim.lr=0.02.")
]


RunsArgument = Annotated[
    list[str], typer.Argument(metavar="RUN|SWEEP...", help="Names or folders of runs; a sweep stands for its runs.")
]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="Name or folder of a run.")]
Target = Annotated[str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run, a checkpoint, or a weights file.")]
ConfigOption = Annotated[
    str | None,
    option("--config", "Config file, or the name of a shipped config."),
]
WeightsConfig = Annotated[str | None, option("--config", "Config of the model, if the file holds weights only.")]
RunOption = Annotated[Path | None, option("--run", "Folder of the run.", "DIR")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON. --json NAME.json writes it to that file instead.")]
SplitOption = Annotated[str | None, option("--split", "Data split. Default: the run's validation split.", "NAME")]
SlideFlag = Annotated[bool, typer.Option("--slide", help="Use windows of eval.slide_px instead of the whole image.")]
TtaFlag = Annotated[bool, typer.Option("--tta", help="Average over flipped and scaled copies.")]


def _version(value: bool) -> None:
    if value:
        from segapp import __version__

        print(f"segapp {__version__}")
        raise typer.Exit


@app.callback()
def _main(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand is None:
        from segapp.commands.runs import show_runs

        if not show_runs():
            print(context.get_help())


_COMMANDS = (
    "set gpu0_bsz=3 | set shares=2,3,3 | set lr_factor=0.5 | set recompute=all | pause | resume | checkpoint | "
    "stop | cancel [ID]"
)


def with_resume_value(arguments: list[str]) -> list[str]:
    """Return the arguments with `auto` inserted after a `--resume` that has no value."""
    if "--resume" not in arguments:
        return arguments
    at = arguments.index("--resume")
    following = arguments[at + 1] if at + 1 < len(arguments) else None
    is_value = (
        following is not None and not following.startswith("-") and ("=" not in following or os.path.exists(following))
    )
    return arguments if is_value else [*arguments[: at + 1], "auto", *arguments[at + 1 :]]


@app.command()
def train(
    overrides: Overrides = None,
    config: ConfigOption = None,
    run: RunOption = None,
    resume: Annotated[
        str | None, option("--resume", "Continue from the last checkpoint, or from this one.", "[auto|RUN|FILE]")
    ] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Train in the foreground and print lines.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Train in the background, without the TUI.")] = False,
    print_config: Annotated[bool, typer.Option("--print-config", help="Print the config with its defaults.")] = False,
    smoke: Annotated[
        bool, typer.Option("--smoke", help="Run a few steps and predict the time, memory and disk space of the run.")
    ] = False,
    json_out: Annotated[bool, typer.Option("--json", help="Print JSON (requires --smoke).")] = False,
) -> None:
    """Train a model.

    The run folder is runs/NAME unless you give --run DIR. In a terminal, segapp trains in a background process and
    shows the TUI; the training continues when you leave the TUI. Without a terminal, or with --plain, it trains in the
    foreground, and Ctrl-C saves a checkpoint and exits with code 75. A run that you continue with --resume gives
    results bitwise identical to an uninterrupted run on the same machine, software and devices. On GPUs this requires
    train.deterministic=true. --smoke trains, evaluates, saves and resumes with a few images in a temporary folder. The
    exit code is 0 if the training has finished and 75 if it was stopped and saved. Any other exit code identifies the
    error (segapp docs exit-codes).
    """
    _ignore_early_signals()
    if plain and detach:
        raise ConfigError("--plain trains in the foreground and --detach in the background: use one of them")
    if smoke and (resume is not None or detach):
        raise ConfigError("--smoke tries a new training in the foreground: leave --resume and --detach out")
    if json_out and not smoke:
        raise ConfigError("--json belongs to --smoke: add --smoke, or use segapp status RUN --json for a run")
    from segapp.config import explain_config
    from segapp.session.request import adopt_launcher, exit_code_for_launcher, plan_request

    request = plan_request(config, overrides or [], run, resume)
    if request.config.parallel.mode != "single":
        adopt_launcher(os.environ)
    if print_config:
        print(explain_config(request.config), end="")
        return
    if "RANK" not in os.environ:  # all ranks find the same problem, and rank 0 reports it
        from segapp.assembly.paths import check_paths
        from segapp.datasets.demo import draw_demo

        draw_demo(request.config.data.root)
        check_paths(request.config, is_new=request.is_new, copies=request.copies)
    if smoke:
        from segapp.commands.smoke import run_smoke

        sys.exit(run_smoke(request, config or "FILE", as_json=json_out))
    from segapp.commands.spawn import is_interactive, show_training, spawn_trainer, wait_for_start

    if detach or (not plain and is_interactive()):
        trainer = spawn_trainer(request, config=config, resume=resume, overrides=overrides or [])
        if detach:
            sys.exit(wait_for_start(trainer))
        sys.exit(show_training(trainer))
    from segapp.run.words import announce, outlast_readers

    outlast_readers()
    if request.folder is not None and "RANK" not in os.environ:
        request.folder.acquire(print)  # while torch is imported, viewers see this, and another resume is refused
    if not sys.stderr.isatty():
        announce("importing torch")  # on a terminal, every command prints this
    from segapp.session.session import run_session

    code = run_session(request, with_resume_value(sys.argv[1:]))
    sys.exit(exit_code_for_launcher(code, os.environ))


def _ignore_early_signals() -> None:
    """Ignore SIGHUP, SIGUSR1 and SIGUSR2, which end the process by default, until the trainer handles them."""
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)


@app.command(context_settings={"ignore_unknown_options": True})
def launch(
    words: Annotated[
        list[str], typer.Argument(metavar="[--] train [TRAIN OPTION]...", help="The training command. It needs --run.")
    ],
    nnodes: Annotated[str, option("--nnodes", "Number of machines, or a minimum and a maximum.", "N|MIN:MAX")] = "1",
    nproc_per_node: Annotated[
        str, option("--nproc-per-node", "Ranks on this machine. gpu: one rank per GPU.", "K|gpu")
    ] = "1",
    rdzv_endpoint: Annotated[
        str | None, option("--rdzv-endpoint", "Host name of one of the machines, and a free port on it.", "HOST:PORT")
    ] = None,
    rdzv_id: Annotated[
        str | None, option("--rdzv-id", "Name of the job. Default: the name of the run folder.", "NAME")
    ] = None,
    secret_file: Annotated[
        Path | None,
        option("--secret-file", "Secret that the machines share. Default: .RUN.secret next to the run.", "FILE"),
    ] = None,
    local_addr: Annotated[
        str | None, option("--local-addr", "Address at which the other machines reach this one.", "ADDRESS")
    ] = None,
    max_restarts: Annotated[
        int, typer.Option("--max-restarts", min=0, help="Give up after this many restarts without a new checkpoint.")
    ] = 3,
) -> None:
    """Train on several machines: run this command on each of them.

    The ranks of all machines start together. If a machine is lost, the others save, or restart from the last
    checkpoint. New machines join at a restart. Every machine ends with the exit code of the run. The machines need a
    private network, and share a secret. Further options are passed to torchrun as --NAME=VALUE.
    """
    _ignore_early_signals()
    at = words.index("train") if "train" in words else len(words)
    arguments = words[at + 1 :]
    command: Any = typer.main.get_command(app)
    train = command.commands["train"].make_context("train", list(arguments)).params
    if at == len(words) or train["run"] is None:
        raise ConfigError("segapp launch starts a training in a named folder: -- train --config FILE --run DIR")
    if train["detach"] or train["smoke"] or train["print_config"]:
        raise ConfigError("--detach, --smoke and --print-config are for one process: leave them out")
    before = ["", *arguments]
    arguments = [word for word, last in zip(arguments, before, strict=False) if "--resume" not in (last, word[:8])]
    arguments += ["--debug"] if "--debug" in sys.argv else []
    from segapp.commands.launch import LaunchRequest
    from segapp.commands.launch import launch as run_launch

    request = LaunchRequest(
        arguments,
        **{name: train[name] for name in ("run", "config", "resume")},
        overrides=train["overrides"] or [],
        nnodes=nnodes,
        nproc_per_node=nproc_per_node,
        rdzv_endpoint=rdzv_endpoint,
        rdzv_id=rdzv_id,
        secret_file=secret_file,
        local_addr=local_addr,
        max_restarts=max_restarts,
        others=words[:at],
    )
    sys.exit(run_launch(request))


@app.command()
def sweep(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SWEEP] [KEY=VALUES]...",
            help="Config files, and values to try: a list A,B,C, or a range of integers 0..4.",
        ),
    ] = None,
    config: Annotated[list[str] | None, option("--config", "Config file, or the name of a shipped config.")] = None,
    jobs: Annotated[int, option("--jobs", "Train N runs at a time, which share the GPUs.", "N", min=1)] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="List the runs without training.")] = False,
    only: Annotated[int | None, option("--only", "Train only run I of the list, in this process.", "I")] = None,
    json_out: Annotated[bool, typer.Option("--json", help="Print the list as JSON (requires --dry-run).")] = False,
) -> None:
    """Train every combination of settings, and print the mean of each setting over seeds and folds.

    Each run is in runs/SWEEP/RUN. Repeat the command to continue runs that were stopped or have failed; runs that have
    finished are kept. Ctrl-C stops at the next safe point with a checkpoint and exits with code 75. If a run fails, the
    others continue, and the exit code is 1. For schedulers: --dry-run lists the runs, and --only trains one of them and
    exits with its code.
    """
    # Before the imports, which take seconds: these signals would end the process, and with it the job.
    _ignore_early_signals()
    if json_out and not dry_run:
        raise ConfigError("--json prints the list of the runs: add --dry-run, or use segapp compare SWEEP --json")
    if only is not None and jobs != 1:
        raise ConfigError("--only trains one run in this process: leave --jobs out")
    from segapp.commands.sweep import print_runs, run_sweep, train_one
    from segapp.run.words import outlast_readers

    if dry_run:
        print_runs(words or [], config or [], only, as_json=json_out)
        return
    if only is None:
        sys.exit(run_sweep(words or [], config or [], jobs))
    # The training runs in this process, and must not end with the reader of its output.
    outlast_readers()
    sys.exit(train_one(words or [], config or [], only))


@app.command()
def attach(
    run: Annotated[
        str | None,
        typer.Argument(metavar="[RUN]", help="A run. Default: the newest live run, or else the newest run."),
    ] = None,
    readonly: Annotated[bool, typer.Option("--readonly", help="Show the run without sending commands.")] = False,
    ascii_only: Annotated[
        bool | None,
        typer.Option("--ascii/--no-ascii", help="Use ASCII characters only. Default: unless the locale has UTF-8."),
    ] = None,
) -> None:
    """Show a run in the TUI, while it trains or afterwards. Leaving the TUI does not stop the run."""
    from segapp.commands.runs import run_to_attach
    from segapp.tui.app import run_ui

    folder = run_to_attach(run)
    sys.exit(run_ui(folder.path, readonly=readonly, ascii_only=ascii_only))


@app.command()
def ctl(
    run: RunArgument,
    words: Annotated[list[str], typer.Argument(metavar="COMMAND...", help=_COMMANDS)],
    after_epoch: Annotated[bool, typer.Option("--after-epoch", help="stop: wait for the end of the epoch.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="set: apply the split even if it is not expected to fit.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the command is applied or rejected.")] = False,
    timeout: Annotated[float, typer.Option(metavar="S", help="Maximum wait in seconds; 0: no limit.")] = 0.0,
) -> None:
    """Send a command to a run while it trains.

    The exit code is 1 if the command is rejected or, with --wait, not applied.
    """
    from segapp.commands.runs import control_run

    sys.exit(control_run(run, words, after_epoch=after_epoch, force=force, wait=wait, timeout_s=timeout))


@app.command("eval")
def evaluate(
    targets: Annotated[
        list[str],
        typer.Argument(metavar="RUN|CHECKPOINT...", help="Runs or checkpoints. Several are averaged."),
    ],
    split: SplitOption = None,
    json_out: JsonFlag = False,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    data_root: Annotated[
        str | None, typer.Option(metavar="DIR", help="Folder of the data set, if it has moved.")
    ] = None,
    devices: Annotated[
        str | None, option("--devices", "Divide the images among devices, e.g. 0,1 or cpu,cpu.", "LIST")
    ] = None,
    config: WeightsConfig = None,
) -> None:
    """Evaluate the best checkpoint of a run, a checkpoint, or (with --config) a weights file.

    If you list several models, segapp evaluates the mean of their class probabilities, as segapp predict does.
    """
    from segapp.assembly.paths import check_data_of

    # A run that is missing is reported before torch is imported, which takes seconds.
    if config is None:
        check_data_of(targets, data_root, split)
    from segapp.commands.evaluate import EvalOptions, evaluate_target

    words = None if devices is None else [word.strip() for word in devices.split(",") if word.strip()]
    places = None if words is None else [int(word) if word.isdecimal() else word for word in words]
    options = EvalOptions(split, slide, tta, data_root, places, config)
    evaluate_target(targets, options, is_json=json_out)


@app.command()
def predict(
    target: Annotated[
        str,
        typer.Argument(
            metavar="RUN|SWEEP|CHECKPOINT|FILE", help="A run, a sweep of folds or seeds, a checkpoint, or weights."
        ),
    ],
    paths: Annotated[
        list[str],
        typer.Argument(metavar="[MODEL]... PATH...", help="More models to average, then images, folders or globs."),
    ],
    out: Annotated[Path, option("--out", "Folder of the results.", "DIR")],
    save: Annotated[
        list[str] | None,
        option(
            "--save",
            "labels, color, overlay, confidence, probabilities, separated by commas. [default: the first three]",
            "KIND",
        ),
    ] = None,
    label_ids: Annotated[
        bool, typer.Option("--label-ids", help="Write the ids of the data set, such as Cityscapes labelIds.")
    ] = False,
    polygons: Annotated[
        str | None,
        option(
            "--polygons", "Write polygons: geojson, gpkg or coco; without --save, nothing else is written.", "FORMAT"
        ),
    ] = None,
    min_area_px: Annotated[
        int, option("--min-area", "Leave out polygons and holes below this area in square pixels.", "PX", min=0)
    ] = 0,
    simplify_px: Annotated[
        float, option("--simplify", "Simplify outlines with a tolerance of PX pixels; 0: exact outlines.", "PX", min=0)
    ] = 0.0,
    slide: SlideFlag = False,
    tta: TtaFlag = False,
    batch: Annotated[str, option("--batch", "Images per batch. auto: as many as fit into memory.", "N|auto")] = "auto",
    config: WeightsConfig = None,
) -> None:
    """Predict images, and write the results to DIR/labels (class ids), DIR/color, DIR/overlay and so on.

    If you list several models, segapp averages their class probabilities. The models must have the same classes. The
    exit code is 3 if an image cannot be read; the others are predicted.
    """
    from segapp.assembly.paths import NETWORK_SUFFIXES, find_runs, split_networks
    from segapp.commands.sweep import repeated_runs
    from segapp.inference.predict.reading import find_images
    from segapp.run.words import printable

    networks, words = split_networks([target, *paths])
    networks = [run for name in networks for run in repeated_runs(name)]
    if config is None:
        find_runs(name for name in networks if not name.endswith(NETWORK_SUFFIXES))
    files, notes = find_images(words, out)
    from segapp.commands.predict import PredictOptions, parse_batch, predict_target
    from segapp.inference.predict.outputs import parse_saved
    from segapp.inference.predict.polygons import parse_polygons

    options = PredictOptions(
        parse_saved(save or []),
        label_ids,
        slide,
        tta,
        parse_batch(batch),
        config,
        parse_polygons(polygons, min_area_px, simplify_px),
    )
    for note in notes:
        print(f"note: {printable(note)}", file=sys.stderr)
    predict_target(networks, files, out, options)


@app.command()
def export(
    target: Target,
    out: Annotated[Path, option("--out", "File to write.")],
    format: Annotated[
        str | None, option("--format", "Default: from the suffix of --out.", "onnx|pt2|safetensors")
    ] = None,
    argmax: Annotated[bool, typer.Option("--argmax", help="Return class ids instead of logits.")] = False,
    size: Annotated[
        str | None, option("--size", "Height and width of the images, one per call; default: any.", "HEIGHTxWIDTH")
    ] = None,
    opset: Annotated[int | None, option("--opset", "Version of ONNX's operators; default: 20.", "N")] = None,
    config: WeightsConfig = None,
) -> None:
    """Export a model to a file that runs without segapp, and check that its output is the same.

    The exported model takes uint8 RGB images (batch, height, width, 3) of any size and returns float32 logits of that
    size. Normalization, padding and upsampling are included, and the metadata has the class names and colors. A
    safetensors file has only the weights, with the parameter names of the model's library, and the same metadata.
    If the outputs differ, nothing is written and the exit code is 1.
    """
    from segapp.commands.export import export_target

    export_target(target, out, format=format, argmax=argmax, size=size, opset=opset, config=config)


@app.command()
def check(
    overrides: Overrides = None,
    config: ConfigOption = None,
    pictures: Annotated[Path | None, option("--pictures", "Folder for an image of the first batch.", "DIR")] = None,
    json_out: JsonFlag = False,
) -> None:
    """Check every file and class id of a data set, and find duplicates. The exit code is 3 if there are errors."""
    from segapp.config import load_runnable, named_config

    loaded = load_runnable(named_config(config, overrides or []), overrides or [])
    from segapp.commands.check import check_data

    sys.exit(check_data(loaded, as_json=json_out, pictures=pictures))


@app.command()
def doctor(json_out: JsonFlag = False) -> None:
    """Check what this machine offers for training, what is missing, and the command that installs it.

    The exit code is 1 if something is missing that a training with default settings needs.
    """
    from segapp.commands.doctor import print_doctor

    sys.exit(print_doctor(as_json=json_out))


@app.command()
def init(
    root: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Folder with your images and their masks or annotations.")
    ],
    out: Annotated[
        Path | None, option("--out", "Config file to write. Default: FOLDER.yaml in the current folder.")
    ] = None,
    layout: Annotated[str | None, option("--layout", "Name of the layout, if several fit.", "NAME")] = None,
    val_share: Annotated[
        float | None,
        option(
            "--val-share",
            "Share of images for validation if there are no splits. Default: 0.2.",
            "SHARE",
            min=0,
            max=1,
        ),
    ] = None,
    group: Annotated[
        str | None, option("--group", "Images with the same match stay in one data split. Default: by scene.", "REGEX")
    ] = None,
    folds: Annotated[
        int | None, option("--folds", "Write one config per fold for cross-validation.", "NUMBER", min=2)
    ] = None,
    seed: Annotated[int, option("--seed", "Random seed for splits and folds.", "NUMBER")] = 0,
    masks: Annotated[
        str | None,
        option(
            "--masks",
            "ids: each value of the masks is a class, although they look like instances or their palettes disagree. "
            "colors: each color is a class.",
            "KIND",
        ),
    ] = None,
    unlabelled: Annotated[
        str | None, option("--unlabelled", "Pixels without a class name: ignore, or class.", "HOW")
    ] = None,
    mask_orientation: Annotated[
        str | None,
        option("--mask-orientation", "raw: masks fit photos as stored, if sizes do not tell.", "HOW"),
    ] = None,
    gpus: Annotated[
        str | None,
        option("--gpus", "GPUs to write the config for, as in plan. Default: the ones of this machine.", "SIZES"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite the config and its file lists.")] = False,
    json_out: JsonFlag = False,
) -> None:
    """Write a config for your data folder, with the reason for each choice. The folder itself is not changed.

    If the folder can be read in several ways, the exit code is 3, and the message names the option to use.
    """
    from segapp.commands.plan import gpu_specs
    from segapp.onboarding.init import InitRequest, init_folder

    chosen = {"masks": masks, "unlabelled": unlabelled, "mask_orientation": mask_orientation}
    specs = None if gpus is None else gpu_specs(gpus)
    request = InitRequest(root, out, force, layout, val_share, group, folds, seed, gpus=specs, is_tried=True, **chosen)
    init_folder(request, as_json=json_out)


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, option("--out", "File to write. Default: report.html in the run folder.")] = None,
    split: SplitOption = None,
    worst: Annotated[int, typer.Option("--worst", min=0, help="Number of images to show, worst first.")] = 8,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Use only the events of the run: no model, no data.")
    ] = False,
) -> None:
    """Write an HTML report of a run: curves, classes, confusion matrix, worst images, memory and settings."""
    from segapp.report.page import write_report

    written = write_report(run, out, split=split, num_worst=worst, has_pictures=not no_images)
    print(f"written: {written} ({written.stat().st_size / 2**20:.1f} MiB)")


@app.command()
def compare(
    runs: RunsArgument,
    html_file: Annotated[Path | None, option("--html", "Write a page with curves, classes and images.")] = None,
    csv_file: Annotated[Path | None, option("--csv", "Write a table with a line for each run.")] = None,
    split: SplitOption = None,
    images: Annotated[
        int, typer.Option("--images", min=0, help="Number of images to show, largest difference first.")
    ] = 6,
    no_images: Annotated[
        bool, typer.Option("--no-images", help="Use only the events of the runs: no model, no data.")
    ] = False,
    json_out: JsonFlag = False,
) -> None:
    """Compare runs: settings that differ, results, speed, memory, and the scores on the same images.

    Each difference is relative to the first run.
    """
    import json

    from segapp.report.compare import compare_runs, csv_of, print_comparison
    from segapp.report.page import save_page

    found = compare_runs(runs, html_file, split=split, num_images=images, has_images=not no_images)
    if csv_file is not None:
        save_page(csv_file, csv_of(found))
    if json_out:
        print(json.dumps(found, indent=2))
    else:
        print_comparison(found)


@app.command()
def suspects(
    runs: RunsArgument,
    split: Annotated[
        str | None, option("--split", "Split to judge; by default the validation split of each run.", "NAME")
    ] = None,
    out: Annotated[
        Path | None, option("--out", "Folder of the files; by default the folder of the run.", "DIR")
    ] = None,
    min_area: Annotated[
        int | None, option("--min-area", "Smallest region; by default 0.05 % of the image.", "PX", min=1)
    ] = None,
) -> None:
    """Find masks that are probably wrong, with runs that were not trained on them.

    Writes suspects.html with images, and suspects.json, which Label Studio reads.
    """
    from segapp.commands.suspects import write_suspects

    write_suspects(runs, split=split, out=out, min_area_px=min_area)


@app.command("ls")
def list_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR|SWEEP]", help="Folder of runs, or a sweep.", show_default=False)
    ] = Path("runs"),
    json_out: JsonFlag = False,
) -> None:
    """List the runs of a folder, by default runs/, or of a sweep, with the reasons of failures."""
    from segapp.commands.runs import print_runs

    print_runs(folder, as_json=json_out)


@app.command()
def status(
    run: RunArgument,
    json_out: JsonFlag = False,
    requeue_code: Annotated[
        int | None, option("--requeue-code", "Exit code of the training, at the end of a job script.", "CODE")
    ] = None,
) -> None:
    """Show the state and progress of a run.

    With --requeue-code, it exits with a code that tells a scheduler whether to restart the job. The exit code is 75
    (restart the job) if a signal stopped the run and a checkpoint was saved. The exit code is 0 if the run has
    finished, or if segapp ctl, the TUI or a program stopped it. Otherwise the exit code is CODE, or 1 if the run was
    stopped twice without a new step.
    """
    from segapp.commands.runs import print_requeue_code, print_status

    if requeue_code is not None:
        sys.exit(print_requeue_code(run, requeue_code))
    print_status(run, as_json=json_out)


ckpt = typer.Typer(help="List and verify the checkpoints of a run.", no_args_is_help=True)
app.add_typer(ckpt, name="ckpt")


@ckpt.command("list")
def ckpt_list(run: RunArgument, json_out: JsonFlag = False) -> None:
    """List the checkpoints from which a run can resume, newest first."""
    from segapp.commands.runs import print_checkpoints

    print_checkpoints(run, as_json=json_out, hashes=False)


@ckpt.command("verify")
def ckpt_verify(run: RunArgument, json_out: JsonFlag = False) -> None:
    """Read every byte of the checkpoints of a run. The exit code is 4 if a checkpoint is damaged."""
    from segapp.commands.runs import print_checkpoints

    sys.exit(print_checkpoints(run, as_json=json_out, hashes=True))


@app.command()
def schema(out: Annotated[Path | None, option("--out", "File to write. Default: standard output.")] = None) -> None:
    """Print the JSON schema of a config file, for editors."""
    import json

    from segapp.config import config_schema
    from segapp.run.files import write_atomic

    text = json.dumps(config_schema(), indent=2) + "\n"
    if out is None:
        print(text, end="")
        return
    with storage_errors(out):
        write_atomic(out, text)


@app.command()
def plan(
    overrides: Overrides = None,
    config: ConfigOption = None,
    gpus: Annotated[
        str | None, option("--gpus", "3x24220MiB, or 24GiB,24GiB,11GiB, or here for this machine.", "LIST")
    ] = None,
    json_out: JsonFlag = False,
) -> None:
    """Predict the peak memory of each GPU for every batch split. No GPU is needed."""
    from segapp.commands.plan import print_plan

    print_plan(config, overrides or [], gpus, as_json=json_out)


@app.command()
def models(
    pattern: Annotated[
        str | None, typer.Argument(metavar="[PATTERN]", help="Part of a name, or a glob: 'smp/Unet/*convnext*'.")
    ] = None,
    size: Annotated[str, option("--size", "Height and width of the images in pixels.", "HxW")] = "512x512",
    json_out: JsonFlag = False,
) -> None:
    """List the models that a config can name, with parameters, size and stride."""
    from segapp.commands.models import print_models

    print_models(pattern, size, as_json=json_out)


@app.command("check-part")
def check_part(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[MODULE:FACTORY] [KEY=VALUE]...", help="A custom component, and config keys to change."
        ),
    ] = None,
    kind: Annotated[
        str | None, option("--as", "Kind of component.", "model|loss|data|optim|schedule|transform")
    ] = None,
    config: ConfigOption = None,
) -> None:
    """Test the custom components of a config, or one of them. The exit code is 2 if a check fails."""
    from segapp.commands.check_part import check_part as run_checks
    from segapp.config import load_config, load_runnable, named_config
    from segapp.config.load import is_config_name

    names, overrides = ([word for word in words or [] if ("=" in word) == has_value] for has_value in (False, True))
    if len(names) > 1:
        raise ConfigError(f"{', '.join(names)}: name one component, or check all of a config with --config FILE")
    name = names[0] if names else None
    is_needed = config is not None or overrides or (name is not None and is_config_name(name))
    load = load_runnable if name is None else load_config  # a component on the command line is the user's own
    loaded = load(named_config(config, words or []), overrides) if is_needed else None
    raise typer.Exit(run_checks(name, kind, loaded))


@app.command()
def docs(
    topic: Annotated[
        str | None,
        typer.Argument(metavar="[TOPIC]", help="Page, or PAGE#SECTION. Default: list all pages."),
    ] = None,
    search: Annotated[str | None, option("--search", "Find the pages that contain these words.", "WORDS")] = None,
) -> None:
    """Show the documentation: list the pages, show a page, or search them."""
    from segapp.commands.docs import show_docs

    show_docs(topic, search)
