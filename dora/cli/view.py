"""`dora view`, `dora report` and `dora trace`: a run folder as a page, as a file, and as a trace."""

from __future__ import annotations

import asyncio
import sys
import tempfile
import webbrowser
from contextlib import suppress
from pathlib import Path

from dora.app.demo import unpack_demo
from dora.app.trace import write_trace as write_trace_events
from dora.app.viewing import folder_server, make_report
from dora.cli.output import say, tell, write_file
from dora.guard import is_loopback


def view(folder: Path | None, *, host: str, port: int, open_browser: bool) -> None:
    """Serve the page until Ctrl-C. `folder`: None shows the recorded run that comes with DORA."""
    with suppress(KeyboardInterrupt):
        if folder is not None:
            asyncio.run(_serve(folder, host=host, port=port, open_browser=open_browser))
            return
        with tempfile.TemporaryDirectory(prefix="dora-demo-") as home:
            asyncio.run(_serve(unpack_demo(Path(home)), host=host, port=port, open_browser=open_browser))


async def _serve(folder: Path, *, host: str, port: int, open_browser: bool) -> None:
    async with folder_server(folder, host=host, port=port) as server:
        say(f"{server.url} shows {folder} (Ctrl-C ends it)")
        if not (host == "localhost" or is_loopback(host)):
            say(f"answers need the status token: {server.token}")
        sys.stdout.flush()
        if open_browser and not webbrowser.open(server.url):
            tell("--open: no browser was found; open the address yourself")
        await asyncio.Event().wait()


def write_report(folder: Path, output: Path | None) -> None:
    """Write the report of a run."""
    html = asyncio.run(make_report(folder))
    path = output or Path(f"{folder.resolve().name}.html")
    write_file(path, lambda file: file.write(html))
    say(f"{path}: {len(html) / 1e6:.1f} MB")


def write_trace(folder: Path, output: Path | None) -> None:
    """Write the trace of a run."""
    path = output or Path(f"{folder.resolve().name}.trace.json")
    count = write_file(path, lambda file: write_trace_events(folder, file))
    say(f"{path}: {count:,} events; open it in https://ui.perfetto.dev")
