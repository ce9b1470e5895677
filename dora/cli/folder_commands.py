"""Defines the commands that show, check or export runs from their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from dora.cli.job_options import TrustFolder
from dora.errors import ConfigError

folders = typer.Typer(rich_markup_mode=None)

ShownFolder = Annotated[Path, typer.Argument(metavar="DIR", help="Run folder.")]


@folders.command()
def status(
    source: Annotated[
        str, typer.Argument(metavar="URL|DIR", help="Address of a run's status endpoint, or a run folder.")
    ] = "http://127.0.0.1:8421",
    watch: Annotated[bool, typer.Option("--watch", help="Keep showing the run until it ends.")] = False,
) -> None:
    """Show a run: while it is running, or how it ended."""
    from dora.cli.status import status as command

    command(source, watch=watch)


@folders.command()
def view(
    folder: Annotated[
        Path | None, typer.Argument(metavar="DIR", help="Run folder: finished, running, or a copy.")
    ] = None,
    demo: Annotated[bool, typer.Option("--demo", help="Show a recorded run that comes with DORA.")] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page; 0 for any free one.")] = 8422,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Unless it is loopback, answers need the status token.")
    ] = "127.0.0.1",
    open_browser: Annotated[bool, typer.Option("--open", help="Open the page in a browser.")] = False,
) -> None:
    """Serve the page of a run from its folder."""
    from dora.cli.view import view as command

    if (folder is None) != demo:
        raise ConfigError("dora view: give a run folder, or --demo")
    command(folder, host=host, port=port, open_browser=open_browser)


@folders.command()
def report(
    folder: ShownFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: the run's name with .html.")
    ] = None,
) -> None:
    """Write the page of a run as one HTML file that opens offline."""
    from dora.cli.view import write_report as command

    command(folder, output)


@folders.command()
def trace(
    folder: ShownFolder,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", metavar="FILE", help="Default: the run's name with .trace.json.")
    ] = None,
) -> None:
    """Write what every rank and server did as a trace for ui.perfetto.dev."""
    from dora.cli.view import write_trace as command

    command(folder, output)


@folders.command()
def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="DIR...", help="Run folders, also of evaluations; the first is the baseline."),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FILE", help="HTML page with the curves.")] = Path(
        "comparison.html"
    ),
) -> None:
    """Compare runs: settings, figures, curves, and held-out scores prompt by prompt."""
    from dora.cli.compare import compare as command

    command(folders, output)


@folders.command()
def audit(
    folder: ShownFolder,
    deep: Annotated[
        bool,
        typer.Option(
            "--deep", help="Also recompute the log-probs of kept trajectories under their version and its neighbors."
        ),
    ] = False,
) -> None:
    """Prove C1, C2 and C3 from the journal of a run."""
    from dora.cli.audit import audit as command

    command(folder, deep=deep)


@folders.command()
def track(
    folder: ShownFolder,
    to: Annotated[
        list[str] | None,
        typer.Option(metavar="TRACKER", help="Instead of tracking.trackers of the run. May be repeated."),
    ] = None,
    trust_folder: TrustFolder = False,
) -> None:
    """Send the rows that the trackers of an ended run are missing."""
    from dora.cli.track import track as command

    command(folder, to=to, trust_folder=trust_folder)


@folders.command()
def export(
    folder: ShownFolder,
    version: Annotated[int | None, typer.Option(help="Policy version (default: the newest).")] = None,
    to: Annotated[
        Path | None, typer.Option(metavar="OUT", help="Folder to create (default: DIR/export-v<version>).")
    ] = None,
    adapter: Annotated[
        bool,
        typer.Option(
            "--adapter/--merged", help="The adapter alone (trainer.lora), as peft has it, or weights that include it."
        ),
    ] = False,
) -> None:
    """Export a policy version as a Hugging Face model folder."""
    from dora.cli.export import export as command

    command(folder, version=version, to=to, adapter=adapter)
