"""The workload file of measured servers: what `dora check --measure` writes and prints.

Invariant: `dora.sim.workload.load` reads the file as the workload that was measured.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import fmean
from typing import Any, Final

import msgspec
import tomli_w

from dora import files
from dora.app.estimate import size_text
from dora.app.settings import workload_of
from dora.app.speed_check import ServerSpeeds
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.sim.recorded import read_run
from dora.sim.server import SimulatedServer
from dora.sim.workload import WIDTHS, FleetModel, LengthModel, Workload, checked

#: Seconds between two reports of token counts in a run.
_REPORT_S: Final = 1.0
#: Servers that share more than their clients are slower together than alone by more than this factor.
CROWDED: Final = 1.1
#: Characters of a comment.
_WIDTH: Final = 110


def require_new(path: Path) -> None:
    """ConfigError if the file exists, or if its folder does not: before minutes are spent on measuring."""
    if os.path.lexists(path):
        raise ConfigError(f"--measure {path}: exists; name a new file, or remove this one")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"--measure {path}: its folder does not exist")


def recorded_job(run: Path | None, config: Config) -> Workload | None:
    """Return the workload of a finished run (None without one).

    ConfigError if the job of the configuration cannot be simulated, with the lengths of the run if there is one.
    """
    recorded = read_run(run)[0] if run is not None else None
    roomy = {"server": SimulatedServer(kv_tokens=2**52), "time_shared": False}
    checked(_job(config, recorded).with_changes(fleet=roomy), origin="--measure")
    return recorded


def _job(config: Config, recorded: Workload | None) -> Workload:
    """Return the job of the configuration on example servers."""
    base = workload_of(config)
    if recorded is None:
        return base
    rates = {
        "tokens_s_per_device": recorded.train.tokens_s_per_device / base.train.devices_per_rank,
        "update_s": recorded.train.update_s,
        "publish_bytes_s": recorded.train.publish_bytes_s,
    }
    return msgspec.structs.replace(base.with_changes(train=rates), lengths=recorded.lengths, grade=recorded.grade)


def measured_workload(
    config: Config,
    speeds: ServerSpeeds,
    *,
    eval_samples: int,
    recorded: Workload | None = None,
    lengths: LengthModel | None = None,
) -> Workload:
    """Return the job of the configuration on servers of these speeds.

    `recorded`: a finished run, for its lengths, trainer and graders; otherwise they are examples. `lengths`: sampled
    ones, in place of both. ConfigError if the job cannot be simulated.
    """
    server = SimulatedServer(
        slots=speeds.slots,
        kv_tokens=speeds.kv_tokens,
        decode=speeds.decode.decode,
        prefill_s_per_token=speeds.prefill_s_per_token,
    )
    found = _job(config, recorded).with_changes(
        job={"eval_samples": eval_samples, "eval_every": config.eval.every},
        fleet={
            "server": server,
            "time_shared": False,
            "weight_bytes": float(speeds.weight_bytes),
            "push_fixed_s": speeds.pushes.fixed_s,
            "push_bytes_s": speeds.pushes.bytes_s,
            **_store(speeds),
            "widths": (1,) if config.engine.kind == "embedded" else WIDTHS,
            "answer_s": speeds.answer_s,
            "report_s": _REPORT_S,
        },
    )
    return checked(found if lengths is None else msgspec.structs.replace(found, lengths=lengths), origin="--measure")


def _store(speeds: ServerSpeeds) -> dict[str, float]:
    """Return what the store gives to all pushes, if they were seen to share it or carried more than is assumed."""
    carried = speeds.pushes.store_bytes_s or speeds.pushed_together * speeds.pushes.bytes_s
    return {"store_bytes_s": carried} if speeds.pushes.store_bytes_s or carried > FleetModel().store_bytes_s else {}


def write(path: Path, workload: Workload, speeds: ServerSpeeds, *, heading: str) -> None:
    """Write a new file at once; ConfigError if that fails. The measured curve is in its comments."""
    lines = (heading, "", *curve(speeds), "", *findings(speeds))
    wrapped = (part for line in lines for part in textwrap.wrap(line, _WIDTH) or [""])
    text = "".join(f"# {line}".rstrip() + "\n" for line in wrapped)
    try:
        require_new(path)
        files.replace(path, f"{text}\n{tomli_w.dumps(_sections(workload))}".encode())
    except OSError as err:
        raise ConfigError(f"--measure {path}: cannot be written: {err.strerror}") from err


def _sections(workload: Workload) -> dict[str, Any]:
    """Return the parts that are not the default, without keys that are unset."""
    default = Workload()
    parts = {name: getattr(workload, name) for name in workload.__struct_fields__}
    return {name: _set(msgspec.to_builtins(part)) for name, part in parts.items() if part != getattr(default, name)}


def _set(part: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _set(value) if isinstance(value, Mapping) else value for name, value in part.items() if value is not None
    }


def curve(speeds: ServerSpeeds) -> Iterator[str]:
    """Yield the measured curve as the lines of a table: tokens/s of one server."""
    rows = [("batch", "context", "tokens/s", "by the fit")]
    for point in speeds.points:
        fitted = speeds.decode.step_s(batch=point.batch, context=point.context)
        rows.append(
            (
                f"{point.batch}",
                f"{point.context:,.0f}",
                f"{point.batch / point.step_s:,.4g}",
                f"{point.batch / fitted:,.4g}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))


def findings(speeds: ServerSpeeds) -> Iterator[str]:
    """Yield what was measured, one line each."""
    decode, pushes = speeds.decode.decode, speeds.pushes
    together = "" if speeds.num_servers == 1 else f", {speeds.num_servers} servers at the same time"
    together += ", beside a trainer at work" if speeds.beside_trainer else ""
    yield (
        f"decoding{together}: a step takes {1e3 * decode.base_s:.3g} ms + {1e3 * decode.per_request_s:.3g} ms per "
        f"request + {1e9 * decode.per_token_s:.3g} ns per token in KV; largest error of the fit "
        f"{100 * speeds.decode.largest_error:.1f} %"
    )
    if speeds.slowest > 1.1:
        yield f"a server was up to {speeds.slowest:.2f} times as slow as the mean; all are taken to be alike"
    if speeds.crowding > CROWDED:
        yield (
            f"one server alone is {speeds.crowding:.2f} times as fast as with all: they share cores or a link, and a "
            "simulation is too slow for times at which few of them have work"
        )
    yield (
        f"prefill: {1e6 * speeds.prefill_s_per_token:.3g} us per token; {1e3 * speeds.answer_s:.3g} ms per request "
        "besides prefill and decoding"
    )
    yield (
        f"push of {size_text(speeds.weight_bytes)}: {pushes.fixed_s:.3g} s + {size_text(pushes.bytes_s)} per second, "
        f"alone; {_together(speeds)}"
    )


def sampled(lengths: LengthModel) -> str:
    """Return a line about sampled answers."""
    answers = [tokens for group in lengths.answers for tokens in group]
    used_up = sum(tokens >= lengths.cap for tokens in answers)
    return (
        f"answers: {len(answers)} to {len(lengths.answers)} prompts, {fmean(answers):,.0f} tokens on average, "
        f"{max(answers):,} at most; {used_up / len(answers):.0%} used up rollout.max_new_tokens"
    )


def _together(speeds: ServerSpeeds) -> str:
    if speeds.pushed_together == 1:
        return "there is no other server to push to at the same time"
    shared = speeds.pushes.store_bytes_s
    if not shared:
        return f"{speeds.pushed_together} at the same time take no longer"
    return f"{speeds.pushed_together} at the same time share {size_text(shared)} per second"
