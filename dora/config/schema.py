"""What a run can be told: frozen pydantic models, one per component, unknown keys refused.

Every field carries its meaning; docs/CONFIG.md is generated from this file. Components get the plain values or the
section they need, never the whole. Rules that span fields are checked in `Config` and nowhere else, so a contradiction
is found before anything starts. The defaults are the embedded default job; `load.py` fills the models.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dora.core.moves import SILENCE
from dora.core.strategies import Rules, rules_of

Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]


#: Servers to start where nobody says how many, and names none.
DEFAULT_INSTANCES = 4
#: A server, and where the controller listens (a wildcard or a name of an interface is ZeroMQ's to resolve).
_SERVER_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_LISTEN_ADDRESS = re.compile(r"tcp://\S+:(\d+|\*)")
#: What `engine.command` may ask for.
PLACEHOLDERS = ("model", "host", "port", "tp", "slots", "kv_tokens", "dtype", "device", "threads")


class Section(BaseModel):
    """Base of all sections: frozen, and a key it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)


def secret(variable: str) -> Any:
    """A text that comes from the environment alone (see `load.py`) and appears in no dump and no repr."""
    return Field(default=None, exclude=True, repr=False, json_schema_extra={"environment": variable})


class RunConfig(Section):
    """The job as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]+$")] = "dora"
    """Part of the run id `<name>-<time>-<random digits>`; letters, digits, `-`, `_` and `.`."""
    folder: Path = Path("runs")
    """Where run folders are created."""
    seed: int = 0
    """Decides prompt order, sampling noise and initialization; the same seed gives the same prompts."""
    steps: Positive = 24
    """T: the number of training steps; step s trains under version s and publishes version s + 1."""
    no_progress_s: Seconds = 1_800.0
    """The run fails, naming the group, its instance and its age, when nothing was committed or trained for so long. It
    must be longer than the longest answer takes."""


class ModelConfig(Section):
    """The policy to be trained."""

    path: str = "seed"
    """A Hugging Face model folder (config, tokenizer, safetensors), or `seed`: the small policy shipped with DORA."""
    thinking: bool | None = None
    """The chat template's `enable_thinking` switch; unset leaves it to the template."""


class RolloutConfig(Section):
    """How trajectories are generated and when they may be trained."""

    strategy: Literal[
        "dora", "sync", "periodic", "one_step_off", "partial", "partial_bounded", "partial_sync", "oversample"
    ] = "dora"
    """`dora`: several versions alive, bounded staleness, no bubble. `periodic`: on-policy, streamed into the trainer.
    `sync`: on-policy, trained as a whole batch. `one_step_off`: the next batch is generated while this one trains.
    Two kinds break a constraint by design, and say how often. `partial`: every server takes new weights at once, and
    its answers go on under them (several versions in one answer, C1; K bounds what is admitted, not staleness, C3);
    `partial_bounded` keeps C3; `partial_sync` has more groups under way than a step takes, trains when a whole step is
    complete and goes on with the rest afterwards. `oversample`: the same surplus, but the rest is thrown away (C2)."""
    max_staleness: Annotated[int, Field(ge=0)] = 2
    """K: step s trains only on versions s - K to s. 0 is exactly synchronous (`periodic`). It bounds staleness when a
    group is committed, waiting included; it does not bound how long an answer may take. Read by `dora`, by
    `partial_bounded`, and by `partial`, where it only bounds how many groups are admitted; the others fix K at 0, or at
    1 (`one_step_off`). A group's staleness counts from the version at its admission, whatever its later tokens have."""
    pause: Literal["retract", "in_place"] = "retract"
    """How `partial` pauses a server with live requests. `retract`: their KV is dropped and computed again under the new
    weights. `in_place`: they go on over the KV of the old ones, at no cost but the pause."""
    oversample: Annotated[float, Field(gt=1.0)] = 1.5
    """`oversample`, `partial_sync`: groups under way in a step, in units of N."""
    groups_per_step: Positive = 16
    """N: prompt groups per training step."""
    group_size: Positive = 8
    """G: answers sampled per prompt."""
    max_new_tokens: Positive = 128
    """Token budget of one answer, kept over every migration and resume; an answer that reaches it is length-capped."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature; the trainer divides its logits by the same number."""
    filter_zero_variance: bool = True
    """Drop groups whose rewards are all equal: they carry no group-relative advantage."""
    max_top_up: Annotated[float, Field(gt=0.0)] = 10.0
    """A step for which more than max_top_up x N groups were filtered or failed stops the job."""
    rules: Literal["dora", "paper"] = "dora"
    """How the orchestrator places work: by our rules, or by those of the paper (arXiv 2604.26256), for comparison."""
    without: tuple[
        Literal[
            "streaming", "kv_floor", "kv_overcommit", "consolidation", "adaptive_window", "tail_care", "hysteresis"
        ],
        ...,
    ] = ()
    """Rules of the orchestrator to do without; docs/SIMULATION.md says what each is worth."""
    refill: bool = False
    """Let instances of old versions receive new prompts when F allows it; 3-10 % slower in an event model."""
    watchdog_s: Seconds = 120.0
    """An instance none of whose requests got a token for so long is lost, whatever it answers; a prompt that is still
    being read counts as progress. A single request without a token for three times as long, while others get theirs, is
    stopped and goes on elsewhere."""
    max_attempts: Positive = 8
    """A trajectory whose request failed so often, instances lost apart, fails its group with the reason."""


class DecodeConfig(Section):
    """How long a decoding step takes on one instance: base_s + per_request_s x requests + per_token_s x their tokens in
    KV. Consolidation asks it what a move costs the residents; only proportions matter."""

    base_s: Seconds = 2e-3
    """Of a step, however small its batch."""
    per_request_s: Annotated[float, Field(ge=0.0)] = 5e-5
    """For every request in the batch."""
    per_token_s: Annotated[float, Field(ge=0.0)] = 1e-7
    """For every token that the batch holds in KV."""


class EngineConfig(Section):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """Servers that others start (external instances). They may stand beside those that this run starts."""
    instances: int | None = Field(default=None, ge=0)
    """How many servers this run starts and watches (managed instances). Unset: 4 where no `urls` are named, else none.
    `dora` wants at least K + 1 instances in all."""
    kind: Literal["embedded", "sglang"] = "embedded"
    """What managed instances are. `embedded`: DORA's own server. `sglang`: SGLang from this Python environment, with
    --dtype from `trainer.publish_dtype` and --max-running-requests from `slots`."""
    command: tuple[str, ...] = ()
    """The command that starts a managed instance, word by word, in place of the kind's own. {model}, {host}, {port},
    {tp}, {slots}, {kv_tokens}, {dtype}, {device} and {threads} are filled in. With {port} it is ready when /health
    answers there, else when it prints a line `ready http://HOST:PORT`. It must stay in the foreground."""
    args: tuple[str, ...] = ()
    """More words at the end of the command."""
    environment: dict[str, str] = {}
    """More environment variables of managed instances."""
    tensor_parallel: Positive = 1
    """GPUs of one managed instance (`device` cuda), and {tp} in its command."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of this host for managed instances on cuda, `tensor_parallel` for each in turn; one named several times is
    shared. Empty: embedded engines share the first one, others take those after the trainer's ranks. Counted within
    CUDA_VISIBLE_DEVICES where that is set."""
    slots: Positive = 24
    """Requests that one instance decodes at the same time."""
    kv_tokens: Positive = 16_384
    """Tokens of KV room in one instance."""
    decode: DecodeConfig = DecodeConfig()
    """How long a decoding step takes."""
    base_port: Annotated[int, Field(ge=0, le=65_535)] = 0
    """First port; managed instance i listens on base_port + i. 0: free ports are chosen."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where managed instances run."""
    threads: Positive = 1
    """Torch threads of a managed instance."""
    start_timeout_s: Seconds = 120.0
    """How long a managed instance may take until it is ready."""
    push_timeout_s: Seconds = 60.0
    """How long one weight push may take, read-back included."""
    max_parallel_pushes: Positive = 4
    """Pushes under way at the same time; more wait their turn."""
    api_key: str | None = secret("DORA_ENGINE_API_KEY")
    """Bearer token that the servers demand; those that this run starts demand it too. They get it as
    DORA_SERVE_API_KEY; SGLang knows it as a flag only, which every user of its machine can read."""
    path_map: dict[str, str] = {}
    """Store prefix on this host -> prefix under which a server sees it (shared file systems mounted elsewhere)."""


class TrainerConfig(Section):
    """The torchrun trainer and its optimizer."""

    ranks: Positive = 2
    """Trainer processes started on this host."""
    command: tuple[str, ...] = ()
    """The command that starts all ranks on this host, word by word, in place of torchrun. It finds the run by
    DORA_CONTROLLER (address) and DORA_TOKEN."""
    external: bool = False
    """Ranks are started by others; they find this run by DORA_CONTROLLER (address) and DORA_TOKEN."""
    token: str | None = secret("DORA_TOKEN")
    """Shared secret of the controller and its ranks; unset: drawn for every run. External ranks need it."""
    address: str = "tcp://127.0.0.1:0"
    """Where the controller listens for ranks; port 0 picks a free one."""
    device: Literal["cpu", "cuda"] = "cpu"
    """cpu: gloo. cuda: NCCL, one GPU a rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type; master weights and gradient sums stay in float32."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the published safetensors."""
    threads: Positive = 1
    """Torch threads per rank."""
    micro_batch_tokens: Positive = 4_096
    """Token budget of one micro-batch on one rank, prompt tokens included. One answer may exceed it alone."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 5e-4
    """Peak learning rate of AdamW."""
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Steps over which the learning rate rises linearly to its peak."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: Fraction = 0.9
    """AdamW beta1."""
    beta2: Fraction = 0.95
    """AdamW beta2."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Gradient norm above which the gradient is scaled down."""
    advantage: Literal["grpo", "dr_grpo", "rloo"] = "grpo"
    """Group-relative advantage. `dr_grpo`: reward minus the group's mean. `grpo`: that over the deviation in the group.
    `rloo`: reward minus the mean of the other siblings."""
    clip_low: Annotated[float, Field(gt=0.0)] = 0.2
    """PPO clip below 1."""
    clip_high: Annotated[float, Field(gt=0.0)] = 0.28
    """PPO clip above 1."""
    tis_cap: Annotated[float, Field(ge=1.0)] = 2.0
    """Truncated importance sampling: the weight of a token is min(rho, tis_cap)."""
    checkpoint_every: Positive = 10
    """Steps between resumable checkpoints; a clean stop writes one too."""
    start_timeout_s: Seconds = 180.0
    """How long the ranks may take until all have reported READY."""


class SourceConfig(Section):
    """One source of prompts."""

    kind: Literal["arithmetic", "reasoning_gym", "jsonl", "parquet", "datasets", "function"] = "arithmetic"
    """`arithmetic`: the built-in long-tailed task. `reasoning_gym`: a dataset of that package by name. `jsonl`,
    `parquet`: a file. `datasets`: a Hugging Face dataset. `function`: module:function returning an iterable of rows."""
    name: str = ""
    """Dataset name (reasoning_gym, datasets) or module:function (function)."""
    path: Path | None = None
    """File (jsonl, parquet)."""
    split: str = "train"
    """Split of a Hugging Face dataset."""
    prompt: str = "prompt"
    """Column with the prompt text."""
    messages: str = ""
    """Column with chat messages ({role, content} list); when set, it is used in place of `prompt`."""
    answer: str = "answer"
    """Column with the reference answer, handed to the reward; empty: rows have none."""
    options: dict[str, Any] = {}
    """Further arguments of the source (for arithmetic and reasoning_gym: the generator's parameters)."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of prompts drawn from this source, relative to the other sources."""


class RewardConfig(Section):
    """One term of the reward; terms are summed with their weights."""

    kind: Literal["math", "exact", "regex", "reasoning_gym", "http", "function"] = "exact"
    """`math`: math-verify. `exact`: equal text after stripping. `regex`: first group of `pattern` equals the answer.
    `reasoning_gym`: the dataset's own scorer. `http`: POST to `url`. `function`: module:function, called with
    prompt=, response=, answer= and metadata= (the row's other columns), returning a number."""
    pattern: str = ""
    """Regular expression (regex)."""
    url: str = ""
    """Endpoint (http): receives {prompt, response, answer, metadata}, returns {"reward": number}."""
    name: str = ""
    """module:function (function)."""
    weight: float = 1.0
    """Factor of this term."""


class TaskConfig(Section):
    """What the policy is asked, and how answers are scored."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(),)
    """Prompt sources, mixed by weight."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(kind="regex", pattern=r"(?:^|\D)(\d\d)$"),)
    """Terms of the reward."""
    system_prompt: str = ""
    """Put before every prompt as the system message (needs a chat template); a row's own system message stands."""
    chat_template: bool = False
    """Render prompts through the chat template of the model folder; off: prompts are plain text."""
    shuffle: bool = True
    """Shuffle finite sources in every epoch, by the run's seed."""
    epochs: Annotated[int, Field(ge=0)] = 0
    """Passes over finite sources; 0: as many as the job needs. The prompts end when the first source does."""
    max_prompt_tokens: Positive = 256
    """Longer prompts are refused, file and line named: the first 10,000 rows at the start, later ones when drawn."""
    graders: Positive = 1
    """Grader processes."""
    grade_timeout_s: Seconds = 10.0
    """A grader busy for longer is killed; its trajectory is `grading_failed`, which is not reward 0."""
    grader_memory_mb: Positive = 2_048
    """Address-space limit of one grader process."""


class EvalSetConfig(Section):
    """One held-out set."""

    name: str = "heldout"
    """Name in metrics."""
    source: SourceConfig = SourceConfig()
    """Where its prompts come from; never the training stream."""
    rewards: tuple[RewardConfig, ...] = ()
    """Scoring; empty: the task's rewards."""
    prompts: Positive = 512
    """How many prompts of the source are used, from its beginning; all if it has fewer."""
    samples: Positive = 1
    """n: answers per prompt; mean@n and pass@k are reported."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""


class EvalConfig(Section):
    """Evaluation beside rollout; version 0 and the last version are always evaluated."""

    sets: tuple[EvalSetConfig, ...] = (EvalSetConfig(),)
    """Held-out sets; empty: no evaluation."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations; 0: only at the beginning and at the end."""
    max_slot_share: Fraction = 0.1
    """Share of all slots that evaluation may take while training work could use them."""


class WeightsConfig(Section):
    """The version store."""

    memory_folder: Path = Path("/dev/shm")
    """Memory-backed folder for live versions; used where it has room for K + 4 versions, else the run folder."""
    transport: Literal["disk", "distributed"] = "disk"
    """How versions come to the servers. `disk`: a server reads the store's folder, which it must see. `distributed`: a
    process beside the trainer broadcasts them (gloo; NCCL where trainer and server are on GPUs), and log-probs or
    checksums are compared after each push; data-parallel servers still read the folder."""
    keep: Annotated[int, Field(ge=0)] = 0
    """Durable versions kept besides those still needed, newest first; 0 keeps all."""


class StatusConfig(Section):
    """The HTTP status endpoint."""

    host: str = "127.0.0.1"
    """Address to bind; loopback unless you say otherwise."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8_421
    """Port of /status, /metrics, /healthz and the page at /; 0 picks a free one."""
    token: str | None = secret("DORA_STATUS_TOKEN")
    """Bearer token of whoever may add, drain and remove instances (`dora instances`); reading needs none. Unset: drawn
    for every run and written into its folder, readable for its owner alone."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level written to `log.jsonl` in the run folder."""
    trajectories_per_step: Annotated[int, Field(ge=0)] = 4
    """Trajectories per step kept with text, tokens and log-probs in `trajectories.jsonl`."""


class Config(Section):
    """A whole run, resolved. `load.py` makes it from TOML and --set."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    task: TaskConfig = TaskConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    status: StatusConfig = StatusConfig()
    log: LogConfig = LogConfig()

    @property
    def max_staleness(self) -> int:
        """K in force: the strategy's own number where it has one."""
        return self.rules.max_staleness

    @property
    def rules(self) -> Rules:
        """The strategy as settings of the decision core."""
        rollout = self.rollout
        return rules_of(
            rollout.strategy,
            max_staleness=rollout.max_staleness,
            pause=rollout.pause,
            oversample=rollout.oversample,
        )

    @property
    def num_managed(self) -> int:
        """Servers the run starts: `engine.instances`, or their default."""
        if self.engine.instances is not None:
            return self.engine.instances
        return 0 if self.engine.urls else DEFAULT_INSTANCES

    @property
    def num_instances(self) -> int:
        """Servers the run begins with: external ones, then those it starts."""
        return len(self.engine.urls) + self.num_managed

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        problems = [
            *self._algorithm_problems(),
            *self._capacity_problems(),
            *self._address_problems(),
            *self._template_problems(),
            *self._evaluation_problems(),
        ]
        if problems:
            raise ValueError("\n".join(problems))
        return self

    def _algorithm_problems(self) -> Iterator[str]:
        if self.rollout.group_size < 2:
            yield (
                f"rollout.group_size: {self.rollout.group_size} sibling has no group to be compared with, and "
                f"advantage '{self.trainer.advantage}' is group-relative; use at least 2"
            )
        if SILENCE * self.rollout.watchdog_s >= self.run.no_progress_s:
            yield (
                f"rollout.watchdog_s: {SILENCE:g} x {self.rollout.watchdog_s:g} s must be below run.no_progress_s "
                f"({self.run.no_progress_s:g} s), else a stuck request ends the run before it goes on elsewhere"
            )

    def _capacity_problems(self) -> Iterator[str]:
        if self.rollout.strategy == "dora" and self.max_staleness + 1 > self.num_instances:
            more = "name more engine.urls" if not self.num_managed else "raise engine.instances"
            yield (
                f"rollout.max_staleness: K = {self.max_staleness} keeps up to {self.max_staleness + 1} versions alive, "
                f"but there are {self.num_instances} instances; lower K or {more}"
            )
        longest = self.task.max_prompt_tokens + self.rollout.max_new_tokens
        if longest > self.engine.kv_tokens:
            yield (
                f"engine.kv_tokens: {self.engine.kv_tokens} cannot hold the longest prompt plus the token budget "
                f"({longest} tokens: task.max_prompt_tokens + rollout.max_new_tokens)"
            )

    def _address_problems(self) -> Iterator[str]:
        for url in self.engine.urls:
            if not _SERVER_URL.fullmatch(url):
                yield f"engine.urls: {url} is no server's address; write it as http://HOST:PORT"
        for url in sorted({url for url in self.engine.urls if self.engine.urls.count(url) > 1}):
            yield f"engine.urls: {url} is named twice; one server is one instance and holds one version at a time"
        if not self.num_instances:
            yield "engine.instances: 0 leaves the run without a server; raise it or name engine.urls"
        if self.engine.base_port and self.engine.base_port + self.num_managed - 1 > 65_535:
            yield f"engine.base_port: {self.engine.base_port} leaves no room for {self.num_managed} ports"
        if not _LISTEN_ADDRESS.fullmatch(self.trainer.address):
            yield f"trainer.address: {self.trainer.address} is nothing to listen on; write it as tcp://HOST:PORT"
        if self.trainer.external and self.trainer.token is None:
            yield "trainer.external: ranks started by others need the run's token; set DORA_TOKEN here and for them"

    def _template_problems(self) -> Iterator[str]:
        engine = self.engine
        for name in sorted(set(re.findall(r"\{([a-z_]+)\}", " ".join((*engine.command, *engine.args))))):
            if name not in PLACEHOLDERS:
                known = ", ".join(f"{{{known}}}" for known in PLACEHOLDERS)
                yield f"engine.command: {{{name}}} is not known; what can be filled in: {known}"
        needed = self.num_managed * engine.tensor_parallel
        if engine.gpus and len(engine.gpus) < needed:
            yield (
                f"engine.gpus: {len(engine.gpus)} named, but {self.num_managed} instances of engine.tensor_parallel = "
                f"{engine.tensor_parallel} take {needed}; one may be named several times"
            )
        if engine.kind == "embedded" and not engine.command and engine.tensor_parallel > 1:
            yield "engine.tensor_parallel: the embedded engine uses one GPU; set it to 1, or engine.kind to sglang"

    def _evaluation_problems(self) -> Iterator[str]:
        names = [s.name for s in self.eval.sets]
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield f"eval.sets: two sets are named '{name}'"
        asked = {source.kind for source in self.task.sources}
        if not asked:
            yield "task.sources: at least one source is needed"
            return
        for index, held_out in enumerate(self.eval.sets):
            if held_out.source.kind == "arithmetic" and "arithmetic" not in asked:
                yield (
                    f"eval.sets.{index}: evaluates the built-in arithmetic, which is not the task; "
                    "name a held-out set of the task, or none with eval.sets = []"
                )
