"""Made-up answers of a run to the page's requests: `python -m tests.status.page_fixture NAME` serves one of RUNS, or
`growing`, which goes on.

`small` has 4 servers, 2 ranks and 48 steps, and texts that look like markup; in `markup` names do, too. `large` has
1,000 servers and 10,000 steps, bounded as a server would. The files of the page come with the policy of a run.
"""

from __future__ import annotations

import json
import random
import re
import sys
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import asdict, replace
from functools import cache
from itertools import accumulate
from operator import sub
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace as replace_fields

from dora.core.state import State
from dora.journal.deep import EVALUATION, KeptPart, KeptTrajectory
from dora.journal.spans import ALL_LANES, TimelineRow
from dora.observe.episodes import EpisodeStats
from dora.observe.facts import ShellFacts
from dora.observe.scores import Score
from dora.observe.sentence import sentence
from dora.observe.snapshot import HoldingRow, InstanceRow, Snapshot, TrainerRow, VersionRow, snapshot
from dora.observe.steps import StepFacts
from dora.observe.timeline import FIRST_BUCKET_S, Timeline
from dora.observe.tokens import TokenAccount
from dora.status.assets import add_page
from tests.core.world import settings

#: Markup in a text that a run may have; a page that parses it has an image and sets a variable.
SCRIPT = "<script>window.parsed = 1</script><img src=x onerror='window.parsed = 1'>"
MAX_ROWS = 2_000
#: Number of rows that `large` gives one by one.
HELD_BACK = 20
Data = dict[str, Any]


class Run:
    """A made-up run of which `trained` steps are done."""

    def __init__(
        self,
        *,
        servers: int,
        steps: int,
        trained: int,
        ranks: int = 2,
        groups: int = 12,
        k: int = 2,
        name: str = "heldout",
        has_episodes: bool = False,
        adapters: bool = False,
    ) -> None:
        """`name`: of the held-out set; if it is SCRIPT, the run is called so, too, and has such a problem."""
        self.adapters = adapters
        self.servers, self.steps, self.trained = servers, steps, trained
        self.ranks, self.groups, self.k, self.name = ranks, groups, k, name
        self.has_episodes = has_episodes
        self.random = random.Random(7)
        self.ended_at: list[float] = []  # of steps
        at = 4.0
        for step in range(trained):
            at += 0.9 + 0.5 * self.random.random() + (1.5 if step == 11 else 0.0)
            self.ended_at.append(at)
        self.now = at + (0.6 if trained < steps else 0.4)

    def spans(self, server: int) -> list[tuple[str, int | None, float, float]]:
        """What a server did."""
        found: list[tuple[str, int | None, float, float]] = [("empty:new", None, 0.5, 2.0), ("push:load", 0, 2.0, 2.6)]
        late = 0.25 + (0.9 if server % 2 else 0.1 * (server % 5))
        at, version = 2.6, 0
        for number, ended in enumerate(self.ended_at, start=1):
            pushed = ended + late
            if number < len(self.ended_at) and self.ended_at[number] + late - pushed < 0.3:
                continue
            idle = 0.12 * self.random.random() * (pushed - at)
            found += [("decoding", version, at, pushed - idle), ("empty:window", version, pushed - idle, pushed)]
            found.append(("push:load", number, pushed, pushed + 0.09))
            at, version = pushed + 0.09, number
        found.append(("decoding", version, at, max(at, self.now)))
        if server == 2 and self.trained > 20:
            begin, end = self.ended_at[17] + 0.2, self.ended_at[20]
            found = [s for s in found if s[3] <= begin or s[2] >= end]
            found.append(("down", None, begin, end))
        return sorted((s for s in found if s[3] > s[2]), key=lambda s: s[2])

    def rank_spans(self) -> list[tuple[str, float, float]]:
        """What a rank did."""
        found, at = [("start", 0.0, 3.2), ("waiting:generation", 3.2, 4.0)], 4.0
        for step, end in enumerate(self.ended_at):
            parts = {"waiting:generation": 3, "packing": 0.4, "forward_backward": 4, "optimizer": 0.6, "copying": 1}
            if step % 10 == 9:
                parts["saving"] = 3
            total = sum(parts.values())
            for activity, share in parts.items():
                stop = at + share / total * (end - at) if activity != list(parts)[-1] else end
                found.append((activity, at, stop))
                at = stop
        return [*found, ("waiting:tail", at, self.now)] if self.now > at else found

    def timeline(self) -> list[TimelineRow]:
        """The rows of timeline.jsonl, at most MAX_ROWS of a kind."""
        instances, ranks = Timeline("instance", begin=0.0, shared=self.adapters), Timeline("rank", begin=0.0)
        if self.servers > 64:
            return self._folded()
        for server in range(self.servers):
            for activity, version, start, end in self.spans(server):
                requests = self._requests(version or 0) if self.adapters and activity == "decoding" else {version: 1}
                for one, count in requests.items():
                    instances.add(server, (activity, one), start, end, share=count / sum(requests.values()))
            for at in self.ended_at[server % 3 :: 5]:
                instances.move(server, at + 0.3)
        for version, at in enumerate([2.2, *(ended + 0.15 for ended in self.ended_at)]):
            instances.publish(version, at)
        for rank in range(self.ranks):
            for activity, start, end in self.rank_spans():
                ranks.add(rank, (activity, None), start, end)
        return [*ranks.rows(self.now, partial=True), *instances.rows(self.now, partial=True)]

    def _folded(self) -> list[TimelineRow]:
        rows, length = [], self.now / MAX_ROWS
        for i in range(MAX_ROWS):
            at = i * length
            newest = sum(1 for ended in self.ended_at[:: self.trained // 1000 or 1] if ended <= at) * (
                self.trained // 1000 or 1
            )
            wave, total = self.random.random(), self.servers * length
            entries = [("decoding", newest, (0.35 + 0.3 * wave) * total), ("push:load", newest, 0.03 * total)]
            entries += [("empty:window", newest, 0.04 * total), ("down", None, 0.01 * total if 700 < i < 720 else 0.0)]
            rest = total - sum(entry[2] for entry in entries)
            entries += [("decoding", max(0, newest - 1), 0.8 * rest), ("decoding", max(0, newest - 2), 0.2 * rest)]
            lanes = {
                rank: [("forward_backward", None, 0.6 * length), ("waiting:tail", None, 0.4 * length)]
                for rank in range(8)
            }
            rows.append(TimelineRow(kind="rank", at=at, s=length, num_lanes=8, lanes=lanes))
            rows.append(
                TimelineRow(
                    kind="instance",
                    at=at,
                    s=length,
                    num_lanes=self.servers,
                    folded=[e for e in entries if e[2]],
                    moved={ALL_LANES: 12} if 719 < i < 725 else {},
                    published=[(newest, at + length / 2)],
                )
            )
        return rows

    # -- rows of metrics.jsonl ----------------------------------------------------------------------------------------

    def facts(self, step: int) -> StepFacts:
        learned, noise = step / max(1, self.steps), 0.04 * self.random.random()
        duration_s = self.ended_at[step] - (self.ended_at[step - 1] if step else 0.0)
        return StepFacts(
            step=step,
            reward_mean=0.55 + 0.1 * learned + noise,
            reward_all_mean=min(1.0, 0.35 + 0.62 * learned**0.6 + noise),
            all_right=0.6 * learned,
            all_wrong=0.5 * (1 - learned),
            all_same=0.0,
            mixed=0.5 - 0.1 * learned,
            num_groups=self.groups,
            num_tokens=round(9000 + 4000 * learned),
            staleness_mean=0.8 + noise,
            response_len_mean=70 + 40 * learned,
            response_len_p90=round(110 + 30 * learned + 150 * noise),
            response_len_max=round(min(160, 135 + 20 * learned + 400 * noise)),
            duration_s=duration_s,
            idle_s=0.33 * duration_s,
            waited_for="28 answers of 7 groups",
        )

    def step_row(self, step: int) -> Data:
        """A row of kind `step`."""
        facts, learned = self.facts(step), step / max(1, self.steps)
        mismatch = {
            f"lag={i}/mismatch_k3": 0.0004 * (1 + 2 * i) * (1 + self.random.random()) for i in range(self.k + 1)
        }
        spent = {
            "forward_backward": 0.4,
            "waiting:generation": 0.22,
            "waiting:tail": 0.1,
            "copying": 0.1,
            "optimizer": 0.06,
        }
        spent |= {"packing": 0.04, "waiting:slowest_rank": 0.05, "saving": 0.03}
        return {
            **{"kind": "step", "at": self.ended_at[step], **msgspec.to_builtins(facts)},
            **({"episodes": asdict(self.episodes(learned))} if self.has_episodes else {}),
            **{"tokens_per_s": 11000 + 900 * self.random.random(), "staleness": [5, 4, 3], "live_versions": 3},
            "rank_s": {name: share * self.ranks * facts.duration_s for name, share in spent.items()},
            "trainer": {
                "all/entropy": 0.9 - 0.5 * learned + 0.03 * self.random.random(),
                "all/mismatch_k3": 0.0009,
                **mismatch,
                "all/truncated_frac": 0.04,
                "loss": 0.01,
                "grad_norm": 0.8,
            },
        }

    def episodes(self, learned: float) -> EpisodeStats:
        return EpisodeStats(
            count=8 * self.groups,
            turns_mean=1.6 + learned,
            turns_max=4,
            calls_mean=1.2 + learned,
            calls_max=4,
            sampled_tokens_mean=20.0,
            observation_tokens_mean=28.0,
            call_s_mean=0.25,
            call_s_p90=0.5,
            call_share=0.2,
            turn_rewards=(0.1, 0.5 * learned),
            truncated={"turns": 1},
        )

    def evaluation_row(self, version: int) -> Data:
        learned = version / max(1, self.steps)
        mean = 0.24 + 0.7 * learned**0.5
        return {
            **{
                "kind": "evaluation",
                "at": self.ended_at[max(0, version - 1)],
                "version": version,
                "name": self.name,
                "mean": mean,
            },
            **{"pass_at": {"1": mean}, "pass_at_n": mean, "is_accuracy": True, "num_samples": 64, "num_failed": 0},
            **{"mean_tokens": 80.0, "median_tokens": 75.0, "max_tokens": 160},
        }

    def rows(self) -> list[Data]:
        """Step rows, thinned to MAX_ROWS, and evaluations."""
        steps = range(0, self.trained, max(1, self.trained // MAX_ROWS))
        versions = range(0, self.trained + 1, max(1, self.steps // 12))
        rows = [*map(self.step_row, steps), *map(self.evaluation_row, versions)]
        return sorted(rows, key=lambda row: float(row["at"]))

    # -- the present --------------------------------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """The status; its sentence is made as in a run."""
        empty = snapshot(
            State(settings()), ShellFacts(run_id="", strategy="dora", phase="running", num_servers=self.servers)
        )
        newest, is_over = self.trained, self.trained >= self.steps
        instances = tuple(self._instance(i, newest) for i in range(self.servers))
        serving = [sum(i.version == v for i in instances) for v in range(newest + 1)]
        versions = tuple(self._version(v, serving[v], newest) for v in range(max(0, newest - self.k), newest + 1))
        sampled = 14_500 * max(1, self.trained)
        dropped = {"filtered: zero variance": round(0.31 * sampled), "failed: grading: timeout": round(0.01 * sampled)}
        account = TokenAccount(
            sampled=sampled,
            trained=round(0.62 * sampled),
            dropped=dropped,
            evaluation=40_000,
            in_flight=round(0.06 * sampled),
        )
        now = replace(
            empty,
            run_id=SCRIPT if self.name == SCRIPT else "sums-2026-11-23",
            phase="finished" if is_over else "running",
            reason=f"all {self.steps} steps are trained" if is_over else "",
            uptime_s=self.now,
            eta_s=None if is_over else 1.2 * (self.steps - self.trained),
            num_steps=self.steps,
            groups_per_step=self.groups,
            steps_trained=self.trained,
            progress=self.trained / self.steps,
            step_forming=self.trained,
            step_committed=4,
            newest_version=newest,
            versions=versions,
            instances=instances,
            instances_by_phase={"serving": self.servers},
            max_staleness=self.k,
            trainer=TrainerRow(
                step=self.trained,
                waits_for="" if is_over else self._waits_for(),
                idle_share=0.33,
                mean_idle_share=0.31,
                idle_reason="28 answers of 7 groups",
                ranks=self.ranks,
                ranks_ready=self.ranks,
            ),
            not_admitting="" if is_over else "another group might miss its deadline (rule F)",
            groups_admitted=18 * self.trained,
            groups_by_phase={"generating": 6, "trained": self.groups * self.trained, "filtered": 5 * self.trained},
            dropped={"filtered: zero variance": 5 * self.trained},
            staleness=tuple(self.trained * n for n in (5, 4, 3)),
            staleness_mean=0.83,
            steps=tuple(self.facts(step) for step in range(max(0, self.trained - 100), self.trained)),
            rewards=(0.25, 0.5),
            task=SCRIPT
            if self.name == SCRIPT
            else "Sums: a3b4c2= asks for 3 + 4 + 2; answers that end in 09 are right.",
            down=(f"server 1 has been down for 3 s (being restarted): {SCRIPT}",) if self.name == SCRIPT else (),
            scores=tuple(
                Score(
                    name=self.name,
                    version=v,
                    mean=0.24 + 0.7 * (v / self.steps) ** 0.5,
                    pass_at_n=0.9,
                    num_samples=64,
                    is_accuracy=True,
                )
                for v in (0, self.trained)
            ),
            problems=(SCRIPT,) if self.name == SCRIPT else (),
            held_out=(self.name,),
            num_tokens=sampled + 40_000,
            num_trained_tokens=round(0.62 * sampled),
            tokens=account,
            rank_s={"forward_backward": 40.0, "waiting:generation": 22.0},
            instance_s={"decoding": 150.0, "empty:window": 9.0},
            tokens_per_s=11_234.0,
            trained_tokens_per_s=7_100.0,
        )
        return replace(now, sentence=sentence(now))

    def _requests(self, newest: int) -> dict[int | None, int]:
        """The requests of a server with adapters: most are of older versions."""
        return {v: 2 + 3 * (newest - v) for v in range(max(0, newest - self.k), newest + 1)}

    def _holdings(self, newest: int) -> tuple[HoldingRow, ...]:
        if not self.adapters:
            return ()
        serving = [HoldingRow(version=v or 0, phase="serving", requests=n) for v, n in self._requests(newest).items()]
        unloading = HoldingRow(version=newest - self.k - 1, phase="unloading", requests=0)
        return (unloading, *serving, HoldingRow(version=newest + 1, phase="loading", requests=0))

    def _instance(self, i: int, newest: int) -> InstanceRow:
        return InstanceRow(
            instance=i,
            url=f"http://127.0.0.1:{30000 + i}",
            phase="serving",
            version=newest if self.adapters else max(0, newest - i % (self.k + 1)),
            pushing=None,
            holdings=self._holdings(newest),
            residents=sum(self._requests(newest).values()) if self.adapters else 11 + i % 5,
            slots=16,
            kv_load=9000,
            kv_tokens=16384,
            incarnation=1,
            asked="",
        )

    def _version(self, version: int, serving: int, newest: int) -> VersionRow:
        return VersionRow(
            version=version,
            is_newest=version == newest,
            is_live=True,
            serving=self.servers if self.adapters else serving,
            loading=0,
            groups=6,
            unfinished=20,
            waiting=3,
            evaluating=False,
        )

    def _waits_for(self) -> str:
        rows = [row for row in self.forming() if row["phase"] == "generating"]
        answers, queued = sum(row["unfinished"] for row in rows), sum(row["queued"] for row in rows)
        return f"{answers} answers of {len(rows)} groups ({queued} answers queued)"

    def forming(self) -> list[Data]:
        """The rows of data/groups."""
        if self.trained >= self.steps:
            return []
        rows, first = [], 18 * self.trained
        for i in range(min(256, self.groups)):
            phase = "committed" if i % 3 == 1 else "grading" if i % 5 == 2 else "generating"
            slack, left = min(self.k, i * (self.k + 1) // self.groups), 1 + i % 7 if phase == "generating" else 0
            rows.append(
                {
                    "group": first + i,
                    "version": max(0, self.trained - self.k + slack),
                    "phase": phase,
                    "slack": slack,
                    "unfinished": left,
                    "queued": left // 4,
                    "graded": 8 - left,
                    "oldest_s": round(9.5 - 8 * i / self.groups, 3),
                }
            )
        return rows

    def samples(self) -> list[Data]:
        """The rows of data/samples."""
        outcomes = ("trained", "filtered: zero variance", EVALUATION, "trained")
        kept = [self._sample(i, outcomes[i % 4]) for i in range(24)]
        return [
            msgspec.to_builtins(self._episode(one) if self.has_episodes and i % 2 else one)
            for i, one in enumerate(kept)
        ]

    def _sample(self, i: int, outcome: str) -> KeptTrajectory:
        a, b = 17 + 3 * i, 5 + 2 * i
        prompt, text = (
            (SCRIPT, SCRIPT) if i == 23 else (f"{a}+{b}-{i}=?", f"{a}+{b}={a + b}\n{a + b}-{i}={a + b - i + i % 2}")
        )
        pieces = tuple(re.findall(r"\w+|\s|.", text))
        logprobs = tuple(-0.3 * self.random.random() for _ in pieces)
        differ = [0.7 if n == 3 else 10 ** (-4 + 3 * self.random.random()) for n in range(len(pieces))]
        right = float(i % 2 == 0)
        return KeptTrajectory(
            step=max(0, self.trained - 1 - i // 4),
            group=i,
            trajectory=i,
            version=max(0, self.trained - 2),
            reward=right - 0.05,
            truncated="",
            prompt=prompt,
            text=text,
            prompt_tokens=(1,),
            tokens=tuple(range(len(pieces))),
            logprobs=logprobs,
            pieces=pieces,
            terms=(("exact", right), ("length", -0.05)),
            trainer_logprobs=tuple(map(sub, logprobs, differ)) if outcome == "trained" else (),
            outcome=outcome,
            answer=str(a + b - i),
        )

    def _episode(self, kept: KeptTrajectory) -> KeptTrajectory:
        """The same sample as an episode of two turns: a call, what it returned, and an answer."""
        text = SCRIPT if self.name == SCRIPT else kept.text
        said = [
            f"<think>{text}</think>\n<tool_call>add</tool_call><|im_end|>",
            f"\n<|im_start|>tool\n{text}<|im_end|>\n",
            text,
        ]
        pieces = [tuple(re.findall(r"\w+|\s|.", part)) for part in said]
        ends = [*accumulate(map(len, pieces))]
        calls = (("add", json.dumps({"text": text})), ("", text))
        return replace_fields(
            kept,
            text="".join(said),
            pieces=sum(pieces, ()),
            tokens=tuple(range(ends[-1])),
            logprobs=tuple(-0.2 * self.random.random() for _ in range(ends[-1])),
            trainer_logprobs=(),
            observed=((ends[0], ends[1]),),
            turn_rewards=(0.5, kept.reward - 0.5),
            calls_s=(0.25, 0.1),
            parts=(
                KeptPart("policy", said[0], ends[0], calls),
                KeptPart("environment", said[1], ends[1]),
                KeptPart("policy", said[2], ends[2]),
            ),
        )

    def answers(self) -> dict[str, Any]:
        """What the page asks for, by name."""
        timeline, steps, samples = self.timeline(), self.rows(), self.samples()
        return {
            "status": self.snapshot(),
            "info": {
                "run_id": "sums-2026-11-23",
                "live": self.trained < self.steps,
                "takes_requests": False,
                "constraints": [],
                "audit": "dora audit runs/sums-2026-11-23",
            },
            "groups": self.forming(),
            "timeline": {"rows": timeline, "next": len(timeline)},
            "steps": {"rows": steps, "next": len(steps)},
            "samples": {"rows": samples, "next": len(samples)},
        }


RUNS: Mapping[str, Mapping[str, Any]] = {
    "small": {"servers": 4, "steps": 48, "trained": 30},
    "adapters": {"servers": 1, "steps": 48, "trained": 30, "adapters": True},
    "markup": {"servers": 4, "steps": 48, "trained": 30, "name": SCRIPT, "has_episodes": True},
    "tools": {"servers": 4, "steps": 48, "trained": 30, "has_episodes": True},
    "finished": {"servers": 4, "steps": 100, "trained": 100},
    "large": {"servers": 1_000, "steps": 12_000, "trained": 10_000, "ranks": 8, "groups": 256, "k": 2},
}


@cache
def made(name: str) -> dict[str, Any]:
    """The answers of one of RUNS."""
    return Run(**RUNS[name]).answers()


def grown(steps: int) -> dict[str, Any]:
    """The answers of a run that goes on, of which so many steps are trained; rows are only added."""
    found = Run(**{**RUNS["small"], "trained": steps}).answers()
    rows = [row for row in found["timeline"]["rows"] if row.s == FIRST_BUCKET_S]
    rows.sort(key=lambda row: row.at)
    found["timeline"] = {"rows": rows, "next": len(rows)}
    return found


def application(name: str) -> web.Application:
    """A server of one of RUNS, or of `growing`: it trains a step whenever its status is asked."""
    steps, asks = 30, Counter[str]()

    async def answer(request: web.Request) -> web.Response:
        nonlocal steps
        asked = request.match_info["name"]
        if name == "growing" and asked == "status":
            steps = min(steps + 1, RUNS["small"]["steps"])
        found = (grown(steps) if name == "growing" else made(name)).get(asked)
        if found is None:
            raise web.HTTPNotFound
        if isinstance(found, dict) and "next" in found:
            asks[asked] += 1
            end = min(len(found["rows"]), len(found["rows"]) - HELD_BACK + asks[asked]) if name == "large" else None
            rows = found["rows"][int(request.query.get("from", "0")) : end]
            found = {"rows": rows, "next": end or found["next"]}
        return web.Response(body=msgspec.json.encode(found), content_type="application/json")

    app = web.Application()
    add_page(app.router)
    app.router.add_get("/data/{name}", answer)
    return app


@asynccontextmanager
async def served(name: str) -> AsyncIterator[str]:
    """The URL of the page of an `application`."""
    runner = web.AppRunner(application(name))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}/"
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    if sys.argv[1] in RUNS:
        made(sys.argv[1])
    web.run_app(application(sys.argv[1]), host="127.0.0.1", port=int(sys.argv[2]) if len(sys.argv) > 2 else 8765)
