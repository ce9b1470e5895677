"""`dora check`: validates a configuration, contacts its servers, and prints the plan.

`--measure` also measures the servers. `--gpus` plans for other GPUs instead, and `--drift` looks for drift.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec
import uvloop

from dora.app.check import Checked, Report, ToMeasure
from dora.app.check import check as check_config
from dora.app.drift_check import train_without_learning, verdict
from dora.app.gpu_plan import Gpus
from dora.app.gpu_plan import check_plan as plan
from dora.app.node_check import check_nodes as wait_for_nodes
from dora.app.speed_file import curve, findings, measured_workload, recorded_job, require_new, sampled, write
from dora.cli.output import say, show_progress
from dora.cli.run import require_steps
from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.sim.workload import Workload


def check(
    config_path: Path | None,
    overrides: Sequence[str],
    *,
    push: bool = False,
    measure: Path | None = None,
    recorded: Path | None = None,
    sample: int = 0,
    json: Path | None = None,
) -> None:
    """`measure`: a new file for the measured servers, with lengths, trainer and graders of the run `recorded`.
    `sample`: number of prompts whose answers give the lengths instead. `json`: a file for the findings."""
    found: list[dict[str, str]] = []

    def report(topic: str, text: str) -> None:
        _print(topic, text)
        found.append({"topic": topic, "text": text})

    if measure is None and (recorded is not None or sample):
        name = f"--from {recorded}" if recorded is not None else f"--sample {sample}"
        raise ConfigError(f"{name}: is valid with --measure only")
    if measure is not None:
        require_new(measure)
    config = _load(config_path, overrides)
    run = recorded_job(recorded, config) if measure is not None else None
    what = ToMeasure(show_progress, num_prompts=sample) if measure is not None else None
    checked = uvloop.run(check_config(config, report, push=push, measure=what))
    if measure is not None:
        show_progress("")
        _write_measured(measure, config, checked, run, origin=recorded, report=report)
    if json is not None:
        try:
            json.write_bytes(msgspec.json.format(msgspec.json.encode(found), indent=1) + b"\n")
        except OSError as err:
            raise ConfigError(f"--json {json}: cannot be written: {err.strerror}") from err
    text = "all checks passed" if checked.is_all_here else "what can be checked before the download is right"
    say(f"{text}; nothing was changed" if measure is None else f"{text}; wrote {measure}; next: dora plan {measure}")


def _write_measured(
    path: Path, config: Config, checked: Checked, run: Workload | None, *, origin: Path | None, report: Report
) -> None:
    """Report the measured servers and write the file."""
    measured = checked.measured
    if measured is None:
        raise ConfigError("--measure: what dora run will download is needed first; nothing was measured")
    speeds, lengths = measured.speeds, measured.lengths
    workload = measured_workload(config, speeds, eval_samples=checked.eval_samples, recorded=run, lengths=lengths)
    for number, line in enumerate((*curve(speeds), *findings(speeds))):
        report("" if number else "measured", line)
    if lengths is not None:
        report("", sampled(lengths))
    others = "trainer and graders" if lengths is not None else "lengths of answers, trainer and graders"
    if origin is not None:
        what = f"{others} are those of {origin}"
        report("", what)
    else:
        what = f"{others} are examples"
        instead = "" if lengths is not None else "; --sample N takes the lengths of answers to N prompts"
        report("not measured", f"{others}: examples{instead}; --from RUN takes those of a finished run")
    write(path, workload, speeds, heading=f"Servers measured by dora check --measure; {what}.")


def check_plan(config_path: Path | None, overrides: Sequence[str], *, gpus: str) -> None:
    """Exit with code 1 if the run does not fit on the GPUs."""
    given = Gpus.parse(gpus)
    if not plan(_load(config_path, overrides), given, _print):
        say(f"the run DOES NOT FIT on {given}")
        raise SystemExit(1)
    say(f"the run fits on {given} by this forecast; nothing was started or measured")


def check_nodes(config_path: Path | None, overrides: Sequence[str]) -> None:
    """Exit with code 1 if a node is missing, or does not receive versions."""
    if not uvloop.run(wait_for_nodes(_load(config_path, overrides), _print)):
        say("NOT ALL NODES ARE READY; nothing was changed")
        raise SystemExit(1)
    say("all nodes are ready; nothing was changed")


def check_drift(config_path: Path | None, overrides: Sequence[str]) -> None:
    """Exit with code 1 if engine and trainer disagree."""
    found = uvloop.run(train_without_learning(_load(config_path, overrides)))
    for line in found.lines():
        say(line)
    is_flat, text = verdict(found)
    say(f"{'flat' if is_flat else 'DRIFT'}: {text}")
    if not is_flat:
        raise SystemExit(1)


def _load(config_path: Path | None, overrides: Sequence[str]) -> Config:
    return require_steps(load(config_path, overrides, environ=os.environ))


def _print(topic: str, text: str) -> None:
    say(f"{topic:<13}{text}")
