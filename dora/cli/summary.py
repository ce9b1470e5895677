"""The summary at the end of a run."""

from __future__ import annotations

from dora.journal.run_folder import RunFolder
from dora.status.snapshot import Snapshot


def summary(now: Snapshot, *, folder: RunFolder, violations: int) -> list[str]:
    """Return the lines: accuracy before and after, throughput, idle time, staleness, audit, and the run folder."""
    lines = [f"{now.phase}: {now.reason}", f"  {now.steps_trained} of {now.num_steps} steps in {now.uptime_s:.0f} s"]
    for name in dict.fromkeys(score.name for score in now.scores):
        scores = [score for score in now.scores if score.name == name]
        first, last = scores[0], scores[-1]
        lines.append(
            f"  held-out accuracy ({name}): {first.mean:.3f} at version {first.version}, "
            f"{last.mean:.3f} at version {last.version}"
        )
    lines.append(
        f"  {now.num_tokens} tokens sampled, {now.num_trained_tokens} trained "
        f"({now.num_trained_tokens / max(now.uptime_s, 1e-9):.0f} per second over the whole run)"
    )
    if now.trainer.idle_share is not None:
        idle = sum(s.idle_s for s in now.steps) / max(sum(s.duration_s for s in now.steps), 1e-9)
        lines.append(f"  trainer idle: {idle:.0%} of the last {len(now.steps)} steps")
    if any(now.staleness):
        total = sum(now.staleness)
        shares = ", ".join(f"{i}: {n / total:.0%}" for i, n in enumerate(now.staleness))
        lines.append(f"  staleness of trained groups: {shares} (mean {now.staleness_mean:.2f})")
    if now.dropped:
        counts = ", ".join(f"{count} {reason}" for reason, count in now.dropped.items())
        lines.append(f"  groups left out: {counts}")
    lines += [f"  {constraint} is broken by design: {counts}" for constraint, counts in now.by_design.items()]
    lines += [f"  drift: {alarm.text}" for alarm in now.alarms]
    lines.append(f"  {now.counts.migrations} migrations, {now.counts.recovered} recovered after losses")
    if now.counts.environment_failed:
        lines.append(f"  {now.counts.environment_failed} trajectories left out, as their environment failed")
    kept = ", ".join(name for name in ("C1", "C2", "C3") if name not in now.by_design)
    lines.append(f"  audit of {kept}: {_verdict(now, violations, folder=folder)}")
    lines.append(f"  everything is in {folder.root}")
    if now.phase == "interrupted":
        lines.append(f"  to continue it: dora run --resume {folder.root}")
    return lines


def _verdict(now: Snapshot, violations: int, *, folder: RunFolder) -> str:
    if now.phase != "finished":
        return f"dora audit {folder.root}"
    return f"{violations} VIOLATIONS: see dora audit {folder.root}" if violations else "clean"
