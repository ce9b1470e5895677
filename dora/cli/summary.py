"""The summary at the end of a run."""

from __future__ import annotations

from collections.abc import Iterator

from dora.app.held_out import read_results
from dora.cli.scores import summary as summary_of_scores
from dora.errors import one_line
from dora.journal.run_folder import RunFolder
from dora.observe.episodes import by_cause
from dora.observe.scores import Score
from dora.observe.sentence import with_observations
from dora.observe.snapshot import Snapshot
from dora.status.frame import by_set, idle_text, mean_text, moves


def summary(now: Snapshot, *, folder: RunFolder, violations: int | None) -> list[str]:
    """Return the lines: held-out reward before and after, throughput, idle time, staleness, audit, and folder.

    Of an evaluation: its scores. `violations`: None without an audit.
    """
    if not now.num_steps and now.phase == "finished":
        return summary_of_scores(read_results(folder), folder, violations=violations)
    lines = [f"{now.phase}: {now.reason}", f"  {now.steps_trained} of {now.num_steps} steps in {now.uptime_s:.0f} s"]
    for name, scores in by_set(now.scores).items():
        ends = [scores[0], *scores[1:][-1:]]
        rewards = ", ".join(f"{mean_text(score)} at version {score.version}" for score in ends)
        lines.append(f"  held-out reward ({name}): {rewards}{_left_out(ends[-1])}")
    lines.append(
        f"  {now.num_tokens:,} tokens sampled, {now.num_trained_tokens:,} trained{with_observations(now)} "
        f"({now.num_trained_tokens / max(now.uptime_s, 1e-9):,.0f} per second over the whole run)"
    )
    if idle := idle_text(now):
        lines.append(f"  trainer idle: {idle}")
    if any(now.staleness):
        total = sum(now.staleness)
        shares = ", ".join(f"{i}: {n / total:.0%}" for i, n in enumerate(now.staleness))
        lines.append(f"  staleness of trained groups: {shares} (mean {now.staleness_mean:.2f})")
    if now.dropped:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in now.dropped.items())
        lines.append(f"  groups left out: {counts}")
    if now.accept_length is not None:
        lines.append(f"  speculative decoding: {now.accept_length:.2f} tokens a step")
    if now.rows_passed:
        lines.append(f"  rows passed over: {now.rows_passed:,}, as the rewards of their last groups were equal")
    lines += [f"  {constraint} is broken by design: {counts}" for constraint, counts in now.by_design.items()]
    lines += [f"  drift: {alarm.text}" for alarm in now.alarms]
    lines.append(f"  {moves(now)}")
    lines += _episodes(now)
    lines += [f"  judges: {now.judges.text}"] if now.judges is not None else []
    kept = ", ".join(name for name in ("C1", "C2", "C3") if name not in now.by_design)
    lines.append(f"  audit of {kept}: {_verdict(violations, folder=folder)}")
    lines.append(f"  everything is in {folder.root}")
    if now.phase == "interrupted":
        lines.append(f"  to continue it: dora {'run' if now.num_steps else 'eval'} --resume {folder.root}")
    return list(map(one_line, lines))


def _left_out(score: Score) -> str:
    return f" ({score.num_failed} of {score.num_failed + score.num_samples} answers failed)" if score.num_failed else ""


def _episodes(now: Snapshot) -> Iterator[str]:
    """The last step's episodes, and how many failed."""
    if now.environment is None:
        return
    if now.steps and (last := now.steps[-1].episodes) is not None:
        yield f"  episodes of the last step: {last.text}; calls: {last.calls_text}"
    if failed := now.environment.failed:
        yield f"  {sum(failed.values())} episodes left out because their environment failed: {by_cause(failed)}"


def _verdict(violations: int | None, *, folder: RunFolder) -> str:
    if violations is None:
        return f"dora audit {folder.root}"
    return f"{violations} VIOLATIONS: see dora audit {folder.root}" if violations else "clean"
