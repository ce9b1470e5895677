"""`dora audit`: proves C1, C2 and C3 from a run's journal. Exit code 3: violated; 1: --deep proved nothing."""

from __future__ import annotations

from pathlib import Path

from dora.app.deep import recompute
from dora.cli.output import say
from dora.cli.run import VIOLATED
from dora.config.recorded import read_recorded
from dora.errors import ConfigError
from dora.journal.audit import DAMAGE
from dora.journal.audit import audit as audit_folder
from dora.journal.audit_report import render
from dora.journal.deep import render_deep
from dora.journal.run_folder import RunFolder


def audit(folder: Path, *, deep: bool) -> None:
    run = RunFolder.open(folder)
    report = audit_folder(run)
    say(*render(report).split("\n"))
    is_violated, is_proved = not report.ok, True
    if deep and any(violation.rule == DAMAGE for violation in report.violations):
        say("--deep is left out: it needs the whole journal and token store")
    elif deep:
        if "C1" in report.broken_by_design:
            raise ConfigError(f"{folder}: --deep needs answers of one version each; this strategy breaks C1 by design")
        found = recompute(run, read_recorded(run.config, environ={}))
        say(*render_deep(found).split("\n"))
        is_violated, is_proved = is_violated or bool(found.violations or found.altered), found.has_confirmed
    if is_violated:
        raise SystemExit(VIOLATED)
    if not is_proved:
        raise SystemExit(1)
