"""The table of docs/SCALE.md that scales what one accelerator does, and what it costs the controller."""

from __future__ import annotations

import re
from statistics import fmean

import msgspec
from result import number
from simulation_found import RESULTS, Results, key, table


def serve(found: Results) -> str:
    """What a controller has to do for each accelerator, scaled to fleets of other sizes."""
    one = next((one for case, one in found.items() if key(case) == ("paper-128", "dora", 3, (), "")), None)
    if one is None:
        return ""
    job, fleet, prompt = one.case.workload().job, one.case.workload().fleet, one.case.workload().lengths.prompt_tokens
    answers_s = job.groups_per_step * job.group_size / one.step_s / fleet.devices
    trained_s = fmean(r.tokens_s for r in one.results) / fleet.devices
    instances = fleet.rollout_devices / fleet.devices_per_instance / fleet.devices
    open_streams = fmean(r.slot_load for r in one.results) * fleet.server.slots * instances
    chunk_s = _bench("streams", r"10,000 streams .*: CPU") / (10_000 * 32 / 16)
    process, process_step_s = (
        _bench("overhead", r"64 instances: process.*"),
        _bench("overhead", r"64 instances, .*: step"),
    )
    answer_s = process / 100 * process_step_s / (64 * 16)
    stream_kb = _bench("streams", r"10,000 streams .*: memory.*")
    event_s = _bench("core", r"10,000 instances, early.*") * 1e-6
    live_b = _bench("core", r"1,000 instances, .* live trajectories")
    columns = []
    for devices in (64, 512, 4_096, 32_768):
        events_s = devices * (2 * answers_s + instances)
        chunks, answers = devices * (trained_s - answers_s * prompt) / 16 * chunk_s, devices * answers_s * answer_s
        columns.append(
            {
                "accelerators": f"{devices:,}",
                "instances": number(devices * instances),
                "open streams, mean": number(devices * open_streams),
                "tokens generated, per second": number(devices * (trained_s - answers_s * prompt)),
                "answers, per second": number(devices * answers_s),
                "streams, chunks of 16: cores": number(chunks),
                "answers: cores, at most": number(answers),
                "**streams and answers: cores**": f"**{number(chunks + answers)}**",
                "events, per second": number(events_s),
                "core: cores": number(events_s * event_s),
                "memory of streams, GB": number(devices * open_streams * stream_kb / 1e6),
                "memory of tokens, 2 N groups untrained, GB": number(2 * devices * trained_s * one.step_s * 8 / 1e9),
                "memory of the core, 2 N groups, GB": number(2 * devices * answers_s * one.step_s * live_b / 1e9),
                "to the trainer, MB/s": number(devices * trained_s * 9 / 1e6),
                "one process, at half a core": "suffices" if chunks + answers <= 0.5 else "does not",
            }
        )
    head, *names = columns[0]
    lines = [(name, *(column[name] for column in columns)) for name in names]
    return table(" | ".join([head, *(column[head] for column in columns)]), lines)


def _bench(name: str, what: str) -> float:
    """Return a figure of a benchmark."""
    result = msgspec.json.decode((RESULTS.parent / f"{name}.json").read_bytes())
    [figure] = {row["figure"] for row in result["rows"] if re.fullmatch(what, row["what"])}
    return float(figure)
