"""What a run is doing, in a few plain words: every view begins with them.

Invariant: pure; a function of the snapshot.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:  # snapshot.py imports this module
    from dora.observe.snapshot import InstanceRow, Snapshot

_NUMBERS: Final = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
#: Number of versions to name; the older ones are counted together.
_NAMED_VERSIONS: Final = 3
ENDED: Final = frozenset({"finished", "interrupted", "failed"})


def sentence(s: Snapshot) -> str:
    """Say what is going on."""
    if s.phase in ENDED:
        return _end(s)
    num_up = sum(row.phase not in ("lost", "starting") for row in s.instances)
    if s.newest_version is None or (s.trainer.ranks_ready < s.trainer.ranks and not num_up):
        begin = (
            f"Resuming after {s.steps_trained:,} of {_count(s.num_steps, 'step')}" if s.groups_admitted else "Starting"
        )
        return f"{begin}: {_share(num_up, s.num_servers, 'server')} up, {_ranks(s)}."
    if not s.num_steps:
        return f"{_evaluation(s, of='the model').capitalize() or 'Starting.'} {_servers(s)}"
    if s.steps_trained >= s.num_steps:
        return f"Training is complete; {_evaluation(s) or 'the run is about to end.'}"
    if not s.steps_trained and not any(row.serving for row in s.versions):
        return f"Starting: version {s.newest_version} is being loaded into {_count(num_up, 'server')}; {_ranks(s)}."
    if not s.groups_admitted and s.evaluation is not None:
        return f"Before step 1 of {s.num_steps:,}, {_evaluation(s)} {_servers(s)}"
    step, waits = f"Step {s.steps_trained + 1:,} of {s.num_steps:,}", _training(s)
    return f"{step}. {_servers(s)} {waits}" if waits else f"{step} is being trained. {_servers(s)}"


def duration(seconds: float | None) -> str:
    """Return a time as people say it; "-" if it is unknown."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days:,} d {hours} h"
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def with_observations(s: Snapshot) -> str:
    """Return what else was in the trained answers than the tokens that were sampled."""
    return " (with observations)" if s.environment is not None else ""


def _end(s: Snapshot) -> str:
    if s.phase == "finished":
        return f"Finished in {duration(s.uptime_s)}: {s.reason}.{_learned(s)}"
    done = f"{s.steps_trained:,} of {_count(s.num_steps, 'step')}" if s.num_steps else duration(s.uptime_s)
    return f"{s.phase.capitalize()} after {done}: {s.reason.rstrip('.')}."


def _learned(s: Snapshot) -> str:
    """Return the reward of the first held-out set before and after, or of the model; "" if it is not known."""
    own = [score for score in s.scores if score.name == s.scores[0].name and score.mean is not None]
    if own and not s.num_steps:
        return f" Held-out reward: {own[0].mean:.3f}."
    if len(own) < 2:
        return ""
    return f" Held-out reward: {own[0].mean:.3f} at version {own[0].version}, {own[-1].mean:.3f} at {own[-1].version}."


def _ranks(s: Snapshot) -> str:
    return (
        f"{_share(s.trainer.ranks_ready, s.trainer.ranks, 'trainer rank')} ready" if s.trainer.ranks else "no trainer"
    )


def _share(count: int, total: int, noun: str) -> str:
    return f"{count:,} of {_count(total, noun)}"


def _count(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def _evaluation(s: Snapshot, *, of: str = "") -> str:
    """Return what is evaluated, or "" if nothing is."""
    if (now := s.evaluation) is None:
        return ""
    what = of or f"version {now.version}"
    return f"{what} is being evaluated: {now.graded:,} of {_count(now.samples, 'answer')} graded."


def _servers(s: Snapshot) -> str:
    """Return who generates with which version, newest first, and what the other servers do."""
    busy = [row.running for row in s.instances if row.running]
    others = Counter(_does(row) for row in s.instances if not row.running)
    clauses = [_generating(busy, s), *(f"{_word(n)} {_is(what, n)}" for what, n in others.items() if n)]
    text = "; ".join([clauses[0], ", ".join(clauses[1:])] if clauses[1:] else clauses)
    return f"{text[0].upper()}{text[1:]}."


def _generating(busy: Sequence[tuple[int, ...]], s: Snapshot) -> str:
    """`busy`: the versions of each server that generates."""
    total, servers = len(busy), Counter(version for running in busy for version in running)
    versions = sorted(servers, reverse=True)
    verb = "generates" if total == 1 else "generate"
    if not total:
        return "no server generates"
    if len(versions) == 1:
        return f"{_word(total)} {_noun(total)} {verb} with v{versions[0]}"
    evaluated = {row.version: " (evaluation)" for row in s.versions if row.evaluating and not row.is_live}
    shown = versions[:_NAMED_VERSIONS]
    named = [f"v{version} on {servers[version]:,}{evaluated.get(version, '')}" for version in shown]
    older = sum(min(running) < shown[-1] for running in busy)
    return (
        f"{_word(total)} {_noun(total)} {verb}: {', '.join([*named, *([f'older ones on {older:,}'] if older else [])])}"
    )


def _does(row: InstanceRow) -> str:
    """Return what an instance without requests does."""
    if row.pushing is not None:
        return f"v{row.pushing}"
    return {"serving": "idle", "draining": "idle", "lost": "down", "blank": "without weights"}.get(row.phase, row.phase)


def _is(what: str, count: int) -> str:
    if what.startswith("v"):
        return f"{'loads' if count == 1 else 'load'} {what}"
    return f"{'is' if count == 1 else 'are'} {what}"


def _training(s: Snapshot) -> str:
    """Return what training waits for; "" while it works."""
    if s.trainer.ranks_ready < s.trainer.ranks:
        return f"Training waits for its ranks: {s.trainer.ranks_ready:,} of {s.trainer.ranks:,} are ready."
    return f"Training waits for {s.trainer.waits_for}." if s.trainer.waits_for else ""


def _noun(count: int) -> str:
    return "server" if count == 1 else "servers"


def _word(count: int) -> str:
    return _NUMBERS[count] if count < len(_NUMBERS) else f"{count:,}"
