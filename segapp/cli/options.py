"""The application, and the arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="segapp",
    help="Train, evaluate and use semantic-segmentation networks.\n\nWith any command: --debug prints the traceback of "
    "an error; --trust-parts imports the own code that a run or a checkpoint names.",
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def option(flag: str, help: str, metavar: str = "FILE") -> Any:
    """Return an option with a value, by default the name of a file."""
    return typer.Option(flag, metavar=metavar, help=help)


Overrides = Annotated[list[str] | None, typer.Argument(metavar="[KEY=VALUE]...", help="Dotted config keys.")]
RunArgument = Annotated[str, typer.Argument(metavar="RUN", help="A run's name or folder.")]
Target = Annotated[
    str, typer.Argument(metavar="RUN|CHECKPOINT", help="A run's name or folder, a checkpoint, or weights.")
]
ConfigOption = Annotated[str | None, option("--config", "A path, or the name of a config.")]
WeightsConfig = Annotated[str | None, option("--config", "For bare weights: the config of their network.")]
RunOption = Annotated[Path | None, typer.Option("--run", metavar="DIR", help="Folder of the run.")]
JsonFlag = Annotated[bool, typer.Option("--json", help="Print JSON.")]
SplitOption = Annotated[
    str | None, option("--split", "Split to evaluate; by default the run's own for validation.", "NAME")
]
SlideFlag = Annotated[bool, typer.Option("--slide", help="Sliding window instead of the whole image.")]
TtaFlag = Annotated[bool, typer.Option("--tta", help="Average over a flip and several scales.")]


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
        from segapp.commands.control import show_runs

        if not show_runs():
            print(context.get_help())
