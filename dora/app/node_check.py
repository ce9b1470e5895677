"""Waits for the nodes of a configuration; reports what they have, and how fast a version reaches each. Changes nothing.

The version is the model itself, which takes the way that versions take in a run. The node that makes versions receives
it too: checkpoints come back on that link.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from dora.app.checkpoint_time import WriteRate, checkpoint_bytes, interval_s, time_of_checkpoint
from dora.app.estimate import Shapes, size_text
from dora.app.fetch import fetch_models, fetch_small
from dora.app.nodes import connects, require_token
from dora.app.opening import publish_model
from dora.app.settings import live_bytes
from dora.app.trainer_check import outline_of
from dora.config.schema import Config
from dora.core.ids import FIRST_VERSION
from dora.errors import ConfigError
from dora.node.cluster import Cluster, ClusterSettings
from dora.node.place import Place
from dora.tls import TlsFiles
from dora.weights.store import Manifest, VersionStore

#: Time in which all nodes must join, and then in which the model must reach all of them.
JOIN_TIMEOUT_S: Final = 120.0
ARRIVAL_TIMEOUT_S: Final = 600.0
#: A clock that differs by more than this makes logs hard to compare; nothing else depends on it.
CLOCK_S: Final = 2.0

#: Receives a topic and a text.
Report = Callable[[str, str], None]


async def check_nodes(config: Config, report: Report) -> bool:
    """Report on all nodes; return whether all are there and receive versions."""
    require_token(config)
    if not config.nodes.expected:
        raise ConfigError("--nodes: nodes.expected is 0, so the run has no nodes; set it")
    config = await asyncio.to_thread(fetch_small, config)  # names the commit, so that all nodes have the same
    model = (await fetch_models(config, tell=partial(report, "download"))).model
    with tempfile.TemporaryDirectory(prefix="dora-check-") as folder:
        root = Path(folder)
        store = VersionStore(memory_root=root / "versions", durable_root=root / "versions")
        manifest = await asyncio.to_thread(publish_model, store, model)
        settings = ClusterSettings(
            run_id=f"check-{secrets.token_hex(4)}",
            term=0,
            token=config.trainer.token or "",
            live_bytes=live_bytes(config, model),
            model=model,
            known={},
            removed=(),
            save=lambda known: None,
            tell=partial(report, "nodes"),
            connects=partial(connects, tls=TlsFiles.of(config.nodes.tls)),
        )
        async with Cluster.listening(config, settings, store=store, checkpoints=root) as cluster:
            are_here = await _report_nodes(cluster, config, live_bytes(config, model), report)
            rates = await _report_links(cluster, manifest, report)
            await cluster.end("the check is over", may_join_another=True)
    if rates and config.checkpoints_are_copied and 0 in rates:
        link = WriteRate(rates[0], f"measured from here to {cluster.places[0].name}")
        report("checkpoint", await asyncio.to_thread(_time_of_checkpoint, config, model, link))
    return are_here and rates is not None


def _time_of_checkpoint(config: Config, model: Path, link: WriteRate) -> str:
    _, outline = outline_of(config, model, None)
    shapes = Shapes.read(model).of(outline)
    interval = interval_s(config, shapes)
    return time_of_checkpoint(config, checkpoint_bytes(config, outline), rate=link, interval=interval)


async def _report_nodes(cluster: Cluster, config: Config, needed: int, report: Report) -> bool:
    places = cluster.places

    def are_here() -> bool:
        return all(place.report is not None for place in places)

    try:
        async with asyncio.timeout(JOIN_TIMEOUT_S):
            await cluster.wait_until(are_here)
    except TimeoutError:
        pass  # what is missing is reported
    for place in places:
        report(f"node {place.number}", _about(place, config, needed))
    return are_here()


def _about(place: Place, config: Config, needed: int) -> str:
    what = "ranks" if place.has_ranks else f"{config.servers_of_node} servers"
    found = place.report
    if found is None:
        return f"MISSING ({what}): {place.lost}"
    room = "enough" if found.shared_bytes >= needed else f"less than the {needed / 2**30:.2f} GB needed: on disk then"
    facts = [
        f"{place.name}, {what}",
        f"{found.gpus} GPUs",
        f"{found.memory_bytes / 2**30:.0f} GB of memory",
        f"{found.shared_bytes / 2**30:.2f} GB for versions ({room})",
        f"{config.engine.kind} {found.engine or 'NOT INSTALLED'}",
        f"at {found.relay.url}",
        f"port {found.meeting_port} is free for ranks or a server over several nodes to meet",
    ]
    if abs(place.clock_ahead_s) > CLOCK_S:
        facts.append(f"its clock is {place.clock_ahead_s:+.0f} s off")
    return ", ".join(facts)


async def _report_links(cluster: Cluster, manifest: Manifest, report: Report) -> dict[int, float] | None:
    """Have the nodes receive the model, one from the other, and report when each has it.

    Return the bytes per second of each by the number of its place; None if one has not received it.
    """
    began = time.monotonic()
    cluster.spread.hold(manifest)
    waiting = [p for p in cluster.places if p.report is not None and (not p.has_ranks or p.number == 0)]
    lacking: list[Place] = []
    rates: dict[int, float] = {}
    try:
        async with asyncio.timeout(ARRIVAL_TIMEOUT_S):
            while waiting:
                await cluster.wait_until(lambda: any(map(_is_decided, waiting)))
                for place in [place for place in waiting if _is_decided(place)]:
                    waiting.remove(place)
                    if place.report is None:
                        lacking.append(place)
                        continue
                    seconds = time.monotonic() - began
                    rates[place.number] = rate = manifest.num_bytes / seconds
                    text = f"{size_text(manifest.num_bytes)} after {seconds:.2f} s ({size_text(rate)} per second)"
                    report("version", f"{place.name}: {text}")
    except TimeoutError:
        lacking += waiting
    for place in lacking:
        reason = place.lost if place.report is None else place.report.problem or f"not within {ARRIVAL_TIMEOUT_S:g} s"
        report("version", f"{place.name}: NOT RECEIVED: {reason}")
    return None if lacking else rates


def _is_decided(place: Place) -> bool:
    """Whether a node has the model, or is lost."""
    return place.report is None or FIRST_VERSION in place.report.versions
