"""`dora export`: exports a policy version as a Hugging Face model folder."""

from __future__ import annotations

from pathlib import Path

from dora.app.export import export as copy_out
from dora.cli.output import say
from dora.core.ids import VersionId
from dora.journal.run_folder import RunFolder


def export(folder: Path, *, version: int | None, to: Path | None) -> None:
    run = RunFolder.open(folder)
    chosen, target = copy_out(run, version=None if version is None else VersionId(version), to=to)
    say(f"version {chosen} of {run.run_id} is in {target}")
