"""An independent check of a run folder: the rules that hold whatever was done to the run's processes and disk.

It shares no code with the run (recorded.py) and has its own tables, so that a mistake in the run's own audit cannot
hide here as well. `check(folder)` returns the violations; an unfinished run may have work in flight,
and may go on meanwhile.

    python -m tests.chaos.checker RUN_DIR     prints them; exit code 3 if there are any
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import xxhash

from tests.chaos.recorded import CHOICES, PROMPT, Chunk, Damaged, Record, read_chunks, read_frames, unpack

#: Files of rows.
ROWS: Final = ("metrics.jsonl", "trajectories.jsonl")


@dataclass(frozen=True)
class Violation:
    """One broken rule."""

    rule: str
    message: str

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


@dataclass
class Verdict:
    """The result of checking a run folder."""

    violations: list[Violation] = field(default_factory=list)
    finished: bool = False
    epochs: int = 0
    trained: int = 0  # groups
    lost: int = 0  # groups that were admitted and neither trained nor dropped, in a finished run
    twice: int = 0  # groups that were trained or dropped more than once


@dataclass
class Server:
    """The state of one inference server."""

    versions: set[int] = field(default_factory=set)  # at most one, unless they are adapters
    pushed: dict[int, int] = field(default_factory=dict)  # attempt -> version of the pushes under way


class Checker:
    """The tables, filled record by record."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.rows = {name: _read(folder / name) for name in ROWS}  # before the journal, which is written first
        self.found = Verdict()
        self.settings: Record = {}
        self.steps = 0
        self.epoch = -1
        self.admitted: dict[int, tuple[int, int]] = {}  # group -> version, epoch
        self.ended: Counter[int] = Counter()  # number of times that a group was trained or dropped
        self.committed: dict[int, int] = {}  # group -> step
        self.by_step: dict[int, list[int]] = defaultdict(list)
        self.closed: dict[int, int] = {}
        self.waves: dict[tuple[int, int], Record] = {}
        self.chains: dict[int, str] = {}
        self.files: dict[int, dict[str, str]] = {}
        self.released: set[int] = set()
        self.version_chains: dict[int, str] = {}
        self.checkpoints: dict[str, tuple[int, str]] = {}  # folder name -> step, chain
        self.servers: dict[int, Server] = defaultdict(Server)
        self.known: dict[int, int] = {}  # trajectory -> known number of tokens
        self.orders: dict[int, Record] = {}  # trajectory -> its latest Generate
        self.lengths: dict[int, int] = {}  # of finished answers
        self.rewards: dict[int, tuple[int, float | None]] = {}  # trajectory -> attempt, reward
        self.grading: dict[int, int] = {}  # trajectory -> attempt

    def say(self, rule: str, message: str) -> None:
        self.found.violations.append(Violation(rule, message))

    def require(self, holds: bool, rule: str, message: str) -> None:
        if not holds:
            self.say(rule, message)

    # -- the journal --------------------------------------------------------------------------------------------------

    def read_journal(self) -> None:
        frames = read_frames(self.folder / "journal.msgpack")
        if not frames.records:
            raise Damaged("journal.msgpack: holds no record")
        for number, record in enumerate(map(unpack, frames.records)):
            kind = record["type"]
            if number == 0:
                self.require(kind == "Header", "journal", f"begins with {kind}")
                self.settings = record["settings"]
                self.steps = self.settings["steps"]
            elif kind == "Epoch":
                self.require(
                    record["epoch"] == self.epoch + 1, "journal", f"epoch {record['epoch']} after {self.epoch}"
                )
                self.epoch = record["epoch"]
            elif kind == "Handled":
                self.require(not self.found.finished or self._goes_on(record), "journal", "facts after the end")
                for fact in (record["event"], *record["commands"]):
                    if (handler := HANDLERS.get(fact["type"])) is not None:
                        handler(self, fact)
        self.found.epochs = self.epoch + 1

    def _goes_on(self, record: Record) -> bool:
        return record["event"]["type"] in ("ControllerRestarted", "CheckpointSaved") or not record["commands"]

    def on_restarted(self, event: Record) -> None:
        self.require(event["epoch"] == self.epoch, "journal", f"epoch {event['epoch']} restarts in epoch {self.epoch}")
        if event["steps"] > self.steps:
            self.steps = event["steps"]
            self.found.finished = False
        self.servers.clear()
        for trajectory, num_tokens in event["num_tokens"].items():
            self.know(trajectory, num_tokens, "the restart")
        self.grading.clear()

    def on_finish(self, order: Record) -> None:
        self.found.finished = True

    # -- groups -------------------------------------------------------------------------------------------------------

    def on_admit(self, order: Record) -> None:
        group, version = order["group"], order["version"]
        self.require(group not in self.admitted, "once", f"group {group} is admitted twice")
        self.admitted[group] = version, self.epoch
        deadline = min(version + self.settings["rules"]["max_staleness"], self.steps - 1)
        self.require(order["deadline"] <= deadline, "staleness", f"group {group}: deadline {order['deadline']}")

    def on_commit(self, order: Record) -> None:
        group, step, version = order["group"], order["step"], order["version"]
        tag = self.admitted.get(group, (None, 0))[0]
        self.require(tag == version, "tag", f"group {group} of version {tag} is committed as one of {version}")
        most = self.settings["rules"]["max_staleness"]
        self.require(0 <= step - version <= most, "staleness", f"group {group}: step {step}, version {version}")
        self.require(group not in self.committed, "once", f"group {group} is committed twice")
        self.require(not self.ended[group], "once", f"group {group} is committed after its end")
        self.require(step not in self.closed, "step", f"group {group} is committed to step {step}, which is closed")
        self.committed[group] = step
        self.by_step[step].append(group)

    def on_close(self, order: Record) -> None:
        step, wanted = order["step"], self.settings["groups_per_step"]
        found = len(self.by_step[step])
        self.require(step not in self.closed, "step", f"step {step} is closed twice")
        self.require(found == order["num_groups"] == wanted, "step", f"step {step} has {found} groups, N is {wanted}")
        self.closed[step] = found

    def on_drop(self, order: Record) -> None:
        group = order["group"]
        self.require(bool(order["reason"]), "reason", f"group {group} is dropped without a reason")
        self.require(group not in self.committed, "once", f"group {group} is dropped after it was committed")
        self.end(group)

    def on_forget(self, order: Record) -> None:
        for group in order["groups"]:
            if group in self.committed:
                self.end(group)

    def end(self, group: int) -> None:
        self.require(group in self.admitted, "once", f"group {group} ends and was never admitted")
        self.ended[group] += 1
        self.require(self.ended[group] == 1, "once", f"group {group} is trained or dropped {self.ended[group]} times")

    # -- servers and answers ------------------------------------------------------------------------------------------

    def on_instance(self, event: Record) -> None:
        self.servers[event["instance"]] = Server()
        version = event.get("version")  # of a server that was taken over
        if version is not None:
            lines = "".join(f"{checksum}  {name}\n" for name, checksum in sorted(self.files.get(version, {}).items()))
            known = hashlib.sha256(lines.encode()).hexdigest()[:8] if version in self.files else None
            self.require(event["digest"] == known, "serving", f"version {version} is taken over with other bytes")
            self.servers[event["instance"]].versions = {version}
        for trajectory, num_tokens in event.get("num_tokens", {}).items():
            self.know(trajectory, num_tokens, "a lost server")

    def on_push(self, order: Record) -> None:
        server = self.servers[order["instance"]]
        if not self.settings.get("adapters"):
            server.versions, server.pushed = set(), {}
        server.pushed[order["attempt"]] = order["version"]
        most = self.settings["rules"]["max_staleness"] + 3 if self.settings.get("adapters") else 1
        held = len(server.versions) + len(server.pushed)
        self.require(held <= most, "serving", f"instance {order['instance']} holds or loads {held} versions")

    def on_push_failed(self, event: Record) -> None:
        self.servers[event["instance"]].pushed.pop(event["attempt"], None)

    def on_unload(self, order: Record) -> None:
        self.servers[order["instance"]].versions.discard(order["version"])

    def on_pushed(self, event: Record) -> None:
        server = self.servers[event["instance"]]
        if server.pushed.get(event["attempt"]) == event["version"]:
            server.versions.add(server.pushed.pop(event["attempt"]))

    def on_generate(self, order: Record) -> None:
        trajectory, version = order["trajectory"], order["version"]
        holds = self.servers[order["instance"]].versions
        told = f"trajectory {trajectory} of version {version}"
        self.require(version in holds, "serving", f"{told} goes to instance {order['instance']}, which holds {holds}")
        if trajectory >= 0:
            tag = self.admitted.get(self.group_of(trajectory), (None, 0))[0]
            self.require(tag == version, "tag", f"{told} belongs to a group of {tag}")
            self.know(trajectory, order["num_tokens"], "a new attempt")
        self.orders[trajectory] = order

    def on_progress(self, event: Record) -> None:
        for trajectory, num_tokens in event["num_tokens"].items():
            self.know(trajectory, num_tokens, "a report", exactly=False)

    def know(self, trajectory: int, num_tokens: int, what: str, *, exactly: bool = True) -> None:
        """Check that an answer does not lose tokens."""
        if trajectory < 0:
            return
        before = self.known.get(trajectory, 0)
        if num_tokens < before and exactly:
            self.say("tokens", f"trajectory {trajectory} has {num_tokens} tokens at {what}, {before} were known")
        self.known[trajectory] = max(before, num_tokens)

    def on_answer(self, event: Record) -> None:
        """Check the versions of the tokens of a complete or stopped answer."""
        trajectory, order = event["trajectory"], self.orders.get(event["trajectory"])
        if order is None or order["attempt"] != event["attempt"] or trajectory in self.lengths:
            return  # of an old attempt
        self.know(trajectory, event["num_tokens"], event["type"])
        place = order["num_tokens"]
        for version, start, end in event["spans"]:
            told = f"trajectory {trajectory}: span {version, start, end}"
            self.require(version == order["version"], "spans", f"{told} does not name version {order['version']}")
            self.require(start == place and end >= start, "spans", f"{told} does not follow token {place}")
            place = end
        total = event["num_tokens"]
        self.require(place == total, "spans", f"trajectory {trajectory}: {place} of {total} tokens are named")
        if event["type"] == "GenerationFinished":
            self.lengths[trajectory] = event["num_tokens"]
            budget = self.settings["max_new_tokens"]
            self.require(event["num_tokens"] <= budget, "tokens", f"trajectory {trajectory} exceeds {budget} tokens")

    def on_call_finished(self, event: Record) -> None:
        """The answer of an episode may end with its environment, at a budget, or because that failed."""
        self.know(event["trajectory"], event["num_tokens"], "a call")
        if event["ended"] or event["failed"]:
            self.lengths[event["trajectory"]] = event["num_tokens"]
        if event["graded"]:
            self.rewards[event["trajectory"]] = event["attempt"], event["reward"]

    def on_grade(self, order: Record) -> None:
        self.grading[order["trajectory"]] = order["attempt"]

    def on_graded(self, event: Record) -> None:
        trajectory = event["trajectory"]
        if self.grading.get(trajectory) != event["attempt"]:
            return
        self.require(trajectory in self.lengths, "tokens", f"trajectory {trajectory} is graded before its end")
        self.require(event["reward"] is not None or bool(event["reason"]), "reason", f"no grade for {trajectory}")
        del self.grading[trajectory]
        self.rewards[trajectory] = event["attempt"], event["reward"]

    def group_of(self, trajectory: int) -> int:
        return trajectory // int(self.settings["group_size"])

    # -- training -----------------------------------------------------------------------------------------------------

    def on_wave(self, order: Record) -> None:
        place = order["step"], order["index"]
        before = self.waves.setdefault(place, order)
        self.require(before == order, "waves", f"wave {place} is not what it was when it was sent first")

    def on_trained(self, event: Record) -> None:
        step, chain = event["step"], event["chain"]
        before = self.chains.setdefault(step, chain)
        self.require(bool(chain) and before == chain, "chain", f"step {step} is trained on {before} and on {chain}")
        self.require(step in self.closed, "step", f"step {step} is trained and not closed")
        self.require(not step or step - 1 in self.chains, "chain", f"step {step} is trained before step {step - 1}")

    def on_published(self, event: Record) -> None:
        version, chain = event["version"], event["chain"]
        files = self.files.setdefault(version, event["files"])
        is_exact = self.settings["deterministic"]
        if is_exact or version not in self.released:
            self.require(files == event["files"], "version", f"version {version} is published with other files")
        if is_exact:
            self.require(not event["differs"], "version", f"version {version} was made again with {event['differs']}")
        before = self.version_chains.setdefault(version, chain)
        made_by = self.chains.get(version - 1) if version else before
        self.require(chain == before == made_by, "chain", f"version {version}: {chain}, its step has {made_by}")

    def on_release(self, order: Record) -> None:
        self.released.add(order["version"])

    def on_saved(self, event: Record) -> None:
        step, chain = event["step"], event["chain"]
        expected = self.chains.get(step - 1) if step else chain
        self.require(chain == expected, "chain", f"checkpoint {step}: {chain}, the step before it has {expected}")
        self.checkpoints[Path(event["folder"]).name] = step, chain

    # -- at the end ---------------------------------------------------------------------------------------------------

    def conclude(self) -> None:
        found = self.found
        found.trained = sum(self.ended[g] for g in self.committed)
        found.twice = sum(n > 1 for n in self.ended.values())
        for step in self.chains:
            for group in self.by_step[step]:
                self.require(self.ended[group] == 1, "once", f"group {group} of step {step}, which is trained, is lost")
            self.check_waves(step)
        if found.finished:
            lost = [group for group in self.admitted if not self.ended[group]]
            found.lost = len(lost)
            self.require(not lost, "once", f"groups {lost[:8]} are neither trained nor dropped")
            missing = [s for s in range(self.steps) if s not in self.chains]
            self.require(not missing, "step", f"steps {missing[:8]} of {self.steps} are not trained")
            self.require(self.steps in self.files, "version", f"the last version, {self.steps}, was never published")

    def check_waves(self, step: int) -> None:
        """Check that committed trajectories with a reward are in exactly one wave each, and the last wave is marked."""
        sent = Counter(t for (s, _), wave in self.waves.items() if s == step for rank in wave["ranks"] for t in rank)
        size = self.settings["group_size"]
        siblings = [g * size + i for g in self.by_step[step] for i in range(size)]
        wanted = Counter(t for t in siblings if self.rewards.get(t, (0, None))[1] is not None)
        wrong = sorted((sent - wanted) + (wanted - sent))
        self.require(not wrong, "waves", f"step {step}: trajectories {wrong[:8]} are not in exactly one wave")
        indices = sorted(i for s, i in self.waves if s == step)
        self.require(indices == list(range(len(indices))), "waves", f"step {step}: waves {indices}")
        last = [self.waves[step, i]["last"] for i in indices]
        self.require(last == [False] * (len(last) - 1) + [True], "waves", f"step {step}: the last wave is {last}")


HANDLERS: Mapping[str, Callable[[Checker, Record], None]] = {
    "ControllerRestarted": Checker.on_restarted,
    "FinishRun": Checker.on_finish,
    "AdmitGroup": Checker.on_admit,
    "CommitGroup": Checker.on_commit,
    "CloseStep": Checker.on_close,
    "DropGroup": Checker.on_drop,
    "ForgetGroups": Checker.on_forget,
    "InstanceUp": Checker.on_instance,
    "InstanceLost": Checker.on_instance,
    "PushWeights": Checker.on_push,
    "WeightPushFinished": Checker.on_pushed,
    "WeightPushFailed": Checker.on_push_failed,
    "UnloadVersion": Checker.on_unload,
    "Generate": Checker.on_generate,
    "ProgressReported": Checker.on_progress,
    "GenerationFinished": Checker.on_answer,
    "GenerationStopped": Checker.on_answer,
    "CallStarted": Checker.on_answer,
    "CallFinished": Checker.on_call_finished,
    "GradeTrajectory": Checker.on_grade,
    "TrajectoryGraded": Checker.on_graded,
    "TrainMicroBatch": Checker.on_wave,
    "StepTrained": Checker.on_trained,
    "VersionPublished": Checker.on_published,
    "ReleaseVersion": Checker.on_release,
    "CheckpointSaved": Checker.on_saved,
}


# -- the other files --------------------------------------------------------------------------------------------------


def check_tokens(checker: Checker) -> Iterator[Violation]:
    """Check that every answer has only chunks of its own admission, no gap, and the length in the journal."""
    prompts: dict[int, int] = {}  # group -> epoch of its latest prompt
    lengths: dict[int, int] = {}  # of prompts, by trajectory
    latest: dict[int, tuple[int, int]] = {}
    answers: dict[int, list[Chunk]] = defaultdict(list)
    for chunk in read_chunks(checker.folder / "tokens.bin"):
        if chunk.kind == PROMPT:
            prompts[chunk.number] = chunk.epoch
            for sibling in range(chunk.number * chunk.start, (chunk.number + 1) * chunk.start):
                answers.pop(sibling, None)
                lengths[sibling] = chunk.count
        elif chunk.kind == CHOICES:
            parts = answers[chunk.number]
            num_tokens = lengths[chunk.number] + parts[-1].start + parts[-1].count if parts else 0
            if chunk.start + chunk.count >= num_tokens:  # nothing has read the last token
                yield Violation("token store", f"trajectory {chunk.number}: experts of tokens that it does not have")
        elif (chunk.epoch, chunk.attempt) >= latest.get(chunk.number, (0, 0)):
            latest[chunk.number] = chunk.epoch, chunk.attempt
            parts = answers[chunk.number]
            if chunk.start > (parts[-1].start + parts[-1].count if parts else 0):
                yield Violation("token store", f"trajectory {chunk.number}: tokens before {chunk.start} are missing")
            parts.append(chunk)
    for group, (_, epoch) in checker.admitted.items():
        if prompts.get(group) != epoch:
            yield Violation(
                "token store", f"group {group}: admitted in epoch {epoch}, its prompt is of {prompts.get(group)}"
            )
    for trajectory, parts in answers.items():
        admitted = checker.admitted.get(checker.group_of(trajectory)) if trajectory >= 0 else None
        if admitted is not None and min(part.epoch for part in parts) < admitted[1]:
            yield Violation("token store", f"trajectory {trajectory} is joined from two admissions")
    for trajectory, known in checker.known.items():
        parts = answers.get(trajectory, [])
        num_tokens = parts[-1].start + parts[-1].count if parts else 0
        length = checker.lengths.get(trajectory)
        if num_tokens < known or (length is not None and num_tokens != length):
            yield Violation(
                "token store", f"trajectory {trajectory}: {num_tokens} tokens, the journal has {length or known}"
            )


def check_metrics(checker: Checker) -> Iterator[Violation]:
    """Check that there is at most one complete row per trained step; only a kill may lose one."""
    seen: Counter[Any] = Counter()
    for number, row in _lines(checker, "metrics.jsonl"):
        if row is None:
            yield Violation("metrics", f"line {number} of metrics.jsonl is torn")
        elif row["kind"] == "step":
            seen["step", row["step"]] += 1
            if row["step"] not in checker.chains:
                yield Violation("metrics", f"metrics.jsonl has step {row['step']}, which is not trained")
        elif row["kind"] == "evaluation":
            seen["evaluation", row["version"], row["name"]] += 1
    for number, row in _lines(checker, "trajectories.jsonl"):
        if row is None:
            yield Violation("metrics", f"line {number} of trajectories.jsonl is torn")
        else:
            seen["trajectory", row["step"], row["trajectory"]] += 1
            is_trained = row.get("outcome", "trained") == "trained"
            committed = checker.committed.get(row["group"])
            known = checker.lengths.get(row["trajectory"], -1 if is_trained else len(row["tokens"]))
            if known != len(row["tokens"]) or committed != (row["step"] if is_trained else None):
                yield Violation("metrics", f"trajectories.jsonl: trajectory {row['trajectory']} is not the journal's")
    if checker.found.finished and checker.epoch == 0:
        for step in checker.chains:
            if not seen["step", step]:
                yield Violation("metrics", f"metrics.jsonl has no row of step {step}")
    for what, count in seen.items():
        if count > 1:
            yield Violation("metrics", f"{what} has {count} rows")


def _lines(checker: Checker, name: str) -> Iterator[tuple[int, Record | None]]:
    """Yield rows, None for a torn one. An unfinished run may have a torn last line: it was killed while writing."""
    lines = checker.rows[name].splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n") and not checker.found.finished:
        lines.pop()
    for number, line in enumerate(lines, 1):
        try:
            yield number, json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            yield number, None


def _read(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def check_versions(checker: Checker) -> Iterator[Violation]:
    """Check that durable versions have the published bytes, and that a finished run has its last one."""
    for path in sorted((checker.folder / "versions").glob("v*")):
        manifest = _manifest(path)
        if manifest is None:
            yield Violation("version", f"{path.name} has no manifest")
            continue
        version = manifest["version"]
        if version not in checker.files and not checker.found.finished:
            continue  # killed before the message arrived
        if path.name != f"v{version:06d}" or manifest["files"] != checker.files.get(version):
            yield Violation("version", f"{path.name} is not what the journal published")
        elif manifest["chain"] != checker.version_chains[version]:
            yield Violation("chain", f"{path.name} has chain {manifest['chain']}")
        for name, checksum in manifest["files"].items():
            data = (path / name).read_bytes() if (path / name).exists() else b""
            if xxhash.xxh3_128_hexdigest(data) != checksum:
                yield Violation("version", f"{path.name}/{name} does not match its checksum")
    if checker.found.finished and not (checker.folder / "versions" / f"v{checker.steps:06d}").exists():
        yield Violation("version", f"version {checker.steps}, the result, has no durable copy")


def check_checkpoints(checker: Checker) -> Iterator[Violation]:
    """Check that checkpoints belong to the history, and that a finished run has one of its last step."""
    steps = set()
    for path in sorted((checker.folder / "checkpoints").glob("step-*")):
        manifest = _manifest(path)
        known = checker.checkpoints.get(path.name)
        if manifest is None:
            yield Violation("checkpoint", f"{path.name} has no manifest")
        elif known is None and not checker.found.finished:
            continue  # killed before the message arrived
        elif known != (manifest["step"], manifest["chain"]) or not path.name.endswith(manifest["chain"][:8]):
            yield Violation("checkpoint", f"{path.name} is not what the journal knows: {known}")
        else:
            steps.add(manifest["step"])
    if checker.found.finished and checker.steps not in steps:
        yield Violation("checkpoint", f"a finished run has no checkpoint of step {checker.steps}")


def _manifest(path: Path) -> Record | None:
    try:
        manifest = json.loads((path / "manifest.json").read_text())
    except (OSError, ValueError):
        return None
    return manifest if isinstance(manifest, dict) else None


def check(folder: Path) -> Verdict:
    """Check a run folder."""
    checker = Checker(folder)
    try:
        checker.read_journal()
        checker.conclude()
        for look in (check_tokens, check_metrics, check_versions, check_checkpoints):
            checker.found.violations += look(checker)
    except Damaged as err:
        checker.say("damage", str(err))
    return checker.found


def main() -> None:
    verdict = check(Path(sys.argv[1]))
    for violation in verdict.violations:
        print(violation)
    state = "finished" if verdict.finished else "not finished"
    print(f"{state}, {verdict.epochs} epochs, {verdict.trained} groups trained, {len(verdict.violations)} violations")
    sys.exit(3 if verdict.violations else 0)


if __name__ == "__main__":
    main()
