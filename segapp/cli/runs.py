"""Commands about runs: report, compare, ls, status, ckpt."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from segapp.cli.options import JsonFlag, RunArgument, SplitOption, app, option


@app.command()
def report(
    run: RunArgument,
    out: Annotated[Path | None, option("--out", "File to write; by default report.html in the run folder.")] = None,
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
    html_file: Annotated[Path | None, option("--html", "Write a page with the curves.")] = None,
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
def list_runs(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR|SWEEP]", help="Folder of the runs, or a sweep.", show_default=False)
    ] = Path("runs"),
    json_out: JsonFlag = False,
) -> None:
    """List the runs and sweeps under runs/, or under another folder, or of a sweep, with the reasons of failures."""
    from segapp.commands import runs as overview

    overview.print_runs(folder, as_json=json_out)


@app.command()
def status(run: RunArgument, json_out: JsonFlag = False) -> None:
    """Show the state and progress of a run or a sweep."""
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
