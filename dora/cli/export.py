"""`dora export`: exports a policy version as a Hugging Face model folder, or its adapter."""

from __future__ import annotations

from pathlib import Path

from dora.app.export import export as copy_out
from dora.cli.output import say
from dora.core.ids import VersionId
from dora.journal.run_folder import RunFolder


def export(folder: Path, *, version: int | None, to: Path | None, adapter: bool) -> None:
    run = RunFolder.open(folder)
    of = None if version is None else VersionId(version)
    chosen, target = copy_out(run, version=of, to=to, adapter=adapter)
    say(f"{'the adapter of ' if adapter else ''}version {chosen} of {run.run_id} is in {target}")
