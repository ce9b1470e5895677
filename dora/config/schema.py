"""The settings of a run: frozen pydantic models, one per section, that refuse unknown keys.

The docstring below a field is its documentation; docs/CONFIG.md is generated from this file. Rules that span fields are
in `dora/config/rules.py`. The defaults describe the embedded default job.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from dora.config.rules import problems
from dora.core.strategies import MAX_GROUP_SIZE, MAX_RANKS, MAX_STALENESS, Rules, rules_of
from dora.objectives.objective import compares_sequences
from dora.objectives.settings import Advantage, ObjectiveConfig
from dora.section import Section

Beta = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(gt=0.0)]

#: Number of servers to start if the configuration gives neither `engine.instances` nor `engine.urls`.
DEFAULT_INSTANCES = 4
#: What an embedded engine that the run starts is given.
EMBEDDED_SLOTS = 24
EMBEDDED_KV_TOKENS = 16_384
MAX_NODES = 1 << 12
#: Number of servers of a node without GPUs.
CPU_NODE_SERVERS = 2
#: Largest rank of an adapter.
MAX_LORA_RANK = 1 << 12
#: Name of the environment that runs programs that drive themselves.
AGENT = "dora.environments.agent:Agent"
#: Name of the environment that has the tools of servers and none of its own.
MCP_TOOLS = "dora.environments.mcp_tools:McpTools"
#: What the prompts of the default job ask for.
SUMS = "Sums: a3b4c2= asks for 3 + 4 + 2; answers that end in 09 are right."


def secret(variable: str) -> Any:
    """Declare a text that is read from the environment only, and appears in no dump and no repr."""
    return Field(default=None, exclude=True, repr=False, json_schema_extra={"environment": variable})


def _number_or_auto(given: Any) -> Any:
    """Refuse other values in one line, where pydantic would have one for each alternative."""
    if given != "auto" and (not isinstance(given, int) or isinstance(given, bool) or given < 0):
        raise ValueError(f"got {json.dumps(given)}, expected a number of nodes or 'auto'")
    return given


class RunConfig(Section):
    """The job as a whole."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_-][A-Za-z0-9_.-]*$")] = "dora"
    """First part of the run id `<name>-<time>-<random digits>`. Letters, digits, `-`, `_` and `.` are allowed, but no
    `.` at its beginning."""
    folder: Path = Path("runs")
    """Folder in which run folders are created."""
    group: str | None = None
    """Unix group whose members may read run folders and live versions. Set it if servers run as another user. Unset:
    only the owner may read them."""
    seed: int = 0
    """Seed for the order of prompts, the sampling noise and the initialization."""
    steps: Annotated[int, Field(ge=0)] = 64
    """T: the number of training steps. Step s trains under version s and publishes version s + 1. 0: the model is only
    evaluated on `eval.sets`, without trainer ranks, as by `dora eval` (docs/EVALUATION.md)."""
    no_progress_s: Seconds = 1_800.0
    """The run fails if no group is committed and no step is trained for this long; the error names the oldest group,
    its instance and its age. Set it higher than the longest answer takes."""


class ModelConfig(Section):
    """The policy to train."""

    path: str = "seed"
    """A Hugging Face model as published (config, tokenizer, safetensors in float32, bfloat16 or FP8): a folder, or an
    id on the hub, such as `Qwen/Qwen3-0.6B`. Or one of the small policies shipped with DORA: `seed` for the arithmetic
    task, `seed-tools` for the one with a tool. A folder that exists is preferred to an id."""
    revision: str = ""
    """Branch, tag or commit of an id on the hub. A run records and keeps the commit that it began with. Empty: the
    default branch."""
    adapter: str = ""
    """Folder of an adapter of this model, as peft and `dora export --adapter` write it, with which training begins:
    version 0 is the model with the adapter, and so is the reference policy. Rank, scale and targets must be those of
    `[trainer.lora]`. Empty: a new adapter, which adds nothing at first."""
    thinking: bool | None = None
    """Value of the chat template's `enable_thinking` switch. Unset: the template's own default."""


class RolloutConfig(Section):
    """How trajectories are generated and when they may be trained."""

    strategy: Literal[
        "dora", "sync", "periodic", "one_step_off", "partial", "partial_bounded", "partial_sync", "oversample"
    ] = "dora"
    """`dora`: several versions are alive, staleness is bounded, and the trainer need not wait for the longest answers.
    `periodic`: on-policy; answers are streamed into the trainer. `sync`: on-policy; a step is trained as a whole batch.
    `one_step_off`: the next batch is generated while this one is trained. The other strategies break a constraint by
    design, and the run reports how often. `partial`: every server takes new weights at once and continues its answers
    under them, so that an answer may have tokens of several versions (C1), and K bounds admission but not staleness
    (C3). `partial_bounded` is the same, but keeps C3. `partial_sync` has more groups under way than a step takes,
    trains when a whole step is complete, and then continues the rest. `oversample` has the same surplus, but discards
    the rest (C2)."""
    max_staleness: Annotated[int, Field(ge=0, le=MAX_STALENESS)] = 2
    """K: step s trains only on versions s - K to s. 0 is exactly synchronous (`periodic`). Staleness is measured when a
    group is committed, from the version at its admission, so that time in a queue counts; how long an answer may take
    is not limited. `dora` and `partial_bounded` use K, and so does `partial`, but only to bound how many groups are
    admitted. The other strategies fix it at 0, or at 1 (`one_step_off`)."""
    oversample: Annotated[float, Field(gt=1.0)] = 1.5
    """Number of groups under way in a step of `oversample` and `partial_sync`, as a multiple of N."""
    groups_per_step: Positive = 12
    """N: the number of prompt groups in a training step."""
    group_size: Annotated[int, Field(ge=1, le=MAX_GROUP_SIZE)] = 8
    """G: the number of answers sampled per prompt."""
    max_new_tokens: Positive = 160
    """Maximum number of tokens in one answer. Migrations and resumes do not reset the count."""
    temperature: Annotated[float, Field(gt=0.0)] = 1.0
    """Sampling temperature. The trainer divides its logits by the same number."""
    filter_zero_variance: bool = True
    """Leave out groups whose rewards are all equal: they have no group-relative advantage."""
    max_top_up: Annotated[float, Field(gt=0.0)] = 10.0
    """The run fails if more than max_top_up x N groups are filtered or fail during one step."""
    watchdog_s: Seconds = 120.0
    """An instance is lost if none of its requests gets a token for this long, even if it still answers health checks;
    reading a long prompt counts as progress. A single request that gets no token for three times as long, while others
    on its instance do, is stopped and continued on another instance."""


class EngineConfig(Section):
    """The inference servers."""

    urls: tuple[str, ...] = ()
    """Addresses of servers that the run does not start itself (external instances). They may be combined with
    `instances`. They must speak SGLang's protocol, as SGLang and `dora serve` do, whatever `kind` is."""
    instances: int | None = Field(default=None, ge=0)
    """Number of servers that the run starts and supervises (managed instances). Unset: 4 if `urls` is empty, else 0.
    `dora` needs at least K + 1 instances in all, or one with `adapters`."""
    kind: Literal["embedded", "sglang"] = "embedded"
    """Kind of the managed instances. `embedded`: DORA's own server. `sglang`: SGLang from this Python environment, with
    --dtype from `trainer.publish_dtype` and, if it is set, --max-running-requests from `slots`."""
    command: tuple[str, ...] = ()
    """Command that starts a managed instance, as a list of arguments; it replaces the one of `kind`. {model}, {host},
    {port}, {tp}, {slots}, {kv_tokens}, {dtype}, {device} and {threads} are filled in and, for a server over several
    nodes, {nodes}, {node_rank} and {master}; options with a value that is unset are left out. With {port}, the server
    is ready when /health answers there; without it, when it prints a line `ready http://HOST:PORT`. The command must
    stay in the foreground."""
    args: tuple[str, ...] = ()
    """Further arguments, appended to the command."""
    environment: dict[str, str] = Field(default={})
    """Further environment variables of managed instances."""
    tensor_parallel: Positive = 1
    """Number of GPUs of one managed instance (`device` cuda); fills in {tp}."""
    gpus: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """GPUs of this host for managed instances on cuda: each instance takes the next `tensor_parallel` of them. A GPU
    that is listed several times is shared. Empty: embedded engines share the first GPU, other servers take those after
    the trainer's ranks. If CUDA_VISIBLE_DEVICES is set, the numbers are positions in it."""
    slots: Positive | None = None
    """Maximum number of requests that one instance decodes at the same time. Unset: as many as the server reports; an
    embedded engine that the run starts is given 24."""
    kv_tokens: Positive | None = None
    """Maximum KV capacity that is used of one instance, in tokens. Unset: all that the server reports; an embedded
    engine that the run starts is given 16,384."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the managed instances."""
    threads: Positive = 1
    """Number of torch threads of a managed instance."""
    min_step_ms: Annotated[float, Field(ge=0.0, le=10_000.0)] = 0.0
    """Least duration of a decoding step of an embedded engine, in ms. An engine that is faster waits without using the
    CPU, so that a laptop shows the waiting times of servers with GPUs, whose steps take about 10 ms. Answers are the
    same. 0: as fast as the device allows."""
    draft_tokens: Annotated[int, Field(ge=0, le=16)] = 0
    """Most tokens that an embedded engine drafts for an answer in one step (speculative decoding): what followed the
    same tokens in its prompt, in itself or in its siblings. Those that are sampled anyway are kept, so answers are the
    same and take fewer steps. The engine measures when that pays: with few answers at a time. Models whose layers carry
    state from token to token get no drafts. 0: none. For SGLang, see docs/ENGINES.md."""
    adapters: bool = False
    """Servers hold the model once, and versions as adapters beside each other, so that one server decodes answers of
    several versions at a time and no answer has to move for a push (needs `trainer.lora`). A command of your own must
    have the flags for that. false: each server holds one version, whose weights include its adapter."""
    start_timeout_s: Seconds = 120.0
    """Time in which a managed instance must become ready."""
    push_timeout_s: Seconds = 60.0
    """Time in which one weight push must finish, read-back included."""
    api_key: str | None = secret("DORA_ENGINE_API_KEY")
    """Bearer token that the servers require. A managed instance finds its own in DORA_SERVE_API_KEY. Unset: one is
    generated at each start and sent to managed instances only."""
    path_map: dict[str, str] = Field(default={})
    """Path prefix of the version store on this host -> prefix under which servers see it, for shared file systems that
    are mounted elsewhere."""


class ParallelConfig(Section):
    """How the trainer's ranks divide weights and sequences; docs/TRAINER.md has what each layout is for."""

    replicate: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Number of copies of the weights (HSDP). The ranks are divided into as many groups, each of which shards weights
    and moments among its ranks; gradients are summed over all. If a group is the ranks of a node, weights are gathered
    within nodes."""
    expert: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Number of consecutive ranks that divide the experts of each layer (EP). Tokens travel to the ranks of their
    experts, whose weights are not gathered. For mixtures of experts only."""
    context: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Number of consecutive ranks that divide each sequence (Ulysses, arXiv 2309.14509), so that a rank keeps a part of
    its activations. In attention, each of them computes some of the heads over all tokens, so it must divide their
    number. Not for models with layers that carry state from token to token."""
    tensor: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 1
    """Number of consecutive ranks that divide the matrices of each layer (TP), which are not gathered over them. They
    compute the same tokens, and sum activations four times a layer: for ranks with a fast link. For dense models."""


class LoraConfig(Section):
    """An adapter that is trained in place of the weights (LoRA, arXiv 2106.09685); docs/TRAINER.md has more."""

    rank: Annotated[int, Field(ge=0, le=MAX_LORA_RANK)] = 0
    """Rank of the product of two matrices that the adapter adds to each target: the smaller dimension of both. 0: there
    is no adapter, and all weights are trained."""
    alpha: Annotated[float, Field(ge=1e-9, le=1e9)] = 32.0
    """The product is scaled by alpha / `rank`."""
    rslora: bool = False
    """Scale the product by alpha / √`rank` instead (arXiv 2312.03732)."""
    targets: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """The linear modules that are adapted, by the last part of their names. Of a mixture of experts, only those of
    attention can be; embeddings and head cannot."""


class TrainerConfig(Section):
    """The torchrun trainer and its optimizer."""

    ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] = 2
    """Number of trainer processes, on this host or, in equal numbers, on nodes (`nodes.train`)."""
    min_ranks: Annotated[int, Field(ge=1, le=MAX_RANKS)] | None = None
    """Fewest ranks that train on while a node is lost. They then train its part of each micro-batch too, and need more
    memory, until a node is in its place and the next checkpoint is written. Unset: training waits for a node."""
    parallel: ParallelConfig = ParallelConfig()
    """How the ranks divide the work beyond data: see `[trainer.parallel]`."""
    command: tuple[str, ...] = ()
    """Command that starts all ranks of a host in place of torchrun, as a list of arguments. The environment variables
    DORA_CONTROLLER (address) and DORA_TOKEN tell it how to reach the run. With ranks on several nodes, PET_NNODES,
    PET_NODE_RANK, PET_MASTER_ADDR and PET_MASTER_PORT tell it its place, as they tell torchrun."""
    token: str | None = secret("DORA_TOKEN")
    """Secret shared by the controller, its ranks and its nodes. Unset: one is generated for every run, which nodes
    could not know."""
    address: str = "tcp://127.0.0.1:0"
    """Address on which the controller listens for ranks; port 0 picks a free port."""
    device: Literal["cpu", "cuda"] = "cpu"
    """`cpu`: the ranks communicate through gloo. `cuda`: through NCCL, with one GPU per rank."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation. Master weights and gradient sums stay in float32."""
    publish_dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the published safetensors."""
    fp32_head: bool = False
    """Compute the logits in float32 where `dtype` is bfloat16, so that they are not rounded to 16 bits. Use it if the
    log-probs of trainer and engine differ too much."""
    activation_checkpointing: Literal["none", "selective", "full", "auto"] = "auto"
    """What the layers keep of a micro-batch for its backward pass; the rest is computed again. `none`: everything is
    kept. `selective`: the outputs of matrix products and attention (about half the memory, 6 % more time). `full`: the
    input of each layer (a twentieth of the memory, 27 % more time). Results are the same. `auto`: the first of these
    modes whose forecast fits in the memory of the GPU or, on a CPU, in the rank's share of the host's free memory;
    `dora check` shows the forecast."""
    compile: bool = False
    """Compile the decoder layers (torch.compile). The forward pass is checked as compiled. It takes seconds to minutes
    at the start, and on a CPU nothing is gained (unverified without a GPU). `activation_checkpointing` must be `none`
    or `full`."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: orthogonalized momentum for the hidden matrices, experts one by one, and AdamW for embeddings, head,
    norms and biases. Its steps are scaled so that the learning rate and weight decay of AdamW apply."""
    optimizer_state: Literal["device", "host", "8bit"] = "device"
    """How the moments of AdamW are stored. `device`: in float32, 8 bytes for each parameter of a rank. `8bit`: in 8
    bits each, 2.02 bytes for each parameter. `host`: in the memory of the host, which then holds 16 bytes for each
    parameter; the update is computed there too."""
    lora: LoraConfig = LoraConfig()
    """The adapter that is trained, if any: see `[trainer.lora]`."""
    threads: Positive = 1
    """Number of torch threads per rank."""
    micro_batch_tokens: Positive = 4_096
    """Maximum number of tokens in one forward pass of one rank, prompts included. A longer answer is a pass by itself.
    Ranks that divide sequences (`parallel.context`) have as many each. Lower it, even in a resume, if a rank runs out
    of memory: the result differs by rounding only."""
    learning_rate: Annotated[float, Field(gt=0.0)] = 2e-5
    """Peak learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate after the warm-up. `linear`, `cosine`: it falls to `min_learning_rate` at the end of `run.steps`.
    All updates of a step have the same rate. After a resume that raises `run.steps`, steps follow the schedule of the
    new number."""
    min_learning_rate: Annotated[float, Field(ge=0.0, lt=1.0)] = 0.0
    """Learning rate at which `linear` and `cosine` end, as a share of the peak."""
    warmup_steps: Annotated[int, Field(ge=0)] = 2
    """Number of steps over which the learning rate rises linearly to its peak."""
    weight_decay: Annotated[float, Field(ge=0.0)] = 0.0
    """Decoupled weight decay of matrices. Norms, biases and embeddings, tied ones included, are not decayed."""
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    """beta1 and beta2 of AdamW."""
    max_grad_norm: Annotated[float, Field(gt=0.0)] = 1.0
    """Maximum gradient norm; a larger gradient is scaled down to it."""
    updates: Positive = 1
    """M: the number of optimizer updates per step. Each takes the next N / M groups in the order of their commits. With
    more than one, a rank keeps the state before the step on the host, 12 bytes for each of its parameters, for a
    checkpoint in mid-step."""
    shared_prompts: Literal["auto", "on", "off"] = "auto"
    """Compute a prompt once for its sibling answers. `auto`: if the answers would otherwise have over 1.15 times as
    many tokens, and the model allows it. `on`: always; it is an error if the model does not allow it."""
    copies: Literal["device", "host"] = "device"
    """Where a rank stores its part of the proximal policy (needed with `updates` > 1, unless objective.proximal is
    `approximate`) and of the reference policy (objective.kl_coefficient > 0). Each of the two policies takes 2 bytes
    per parameter if `dtype` is bfloat16, otherwise 4. `host`: in pinned memory of the host, from which every layer is
    fetched before it computes (unverified without a GPU)."""
    probe_every: Annotated[int, Field(ge=0)] = 4
    """Number of steps from one probe to the next; 0: none. A probe computes the log-probs of up to 512 stale tokens per
    rank, prompts included, under the version that sampled them too, for which it reads the rank's rows of that version.
    It measures the mismatch of the engine (`engine_mismatch_k3`) separately from the drift of the weights
    (`version_drift_k3`). There is none with strategies whose answers have tokens of several versions (`partial`,
    `partial_bounded`, `partial_sync`)."""
    checkpoint_every: Positive = 10
    """Number of steps between resumable checkpoints. A clean stop writes one too."""
    stop_timeout_s: Seconds = 600.0
    """Time limit of a clean stop (Ctrl-C), which waits for the trainer's checkpoint and for environment calls. A second
    Ctrl-C ends the run at once."""
    start_timeout_s: Seconds = 180.0
    """Time in which all ranks must report READY."""


class SourceConfig(Section):
    """One source of prompts."""

    kind: Literal["arithmetic", "reasoning_gym", "seeds", "jsonl", "parquet", "datasets", "function", "verifiers"] = (
        "arithmetic"
    )
    """`arithmetic`: the built-in long-tailed task. `reasoning_gym`: a dataset of that package, by name. `seeds`: rows
    with nothing but a `seed` and the `options`, for an environment that draws its task from them; training and held-out
    sets get different seeds. `jsonl`, `parquet`: a file. `datasets`: a data set on the Hugging Face hub, or a folder in
    the same form. `function`: a function of yours that returns an iterable of rows. `verifiers`: the tasks of the task
    set that is the environment. `reasoning_gym`, `parquet` and `datasets` need an extra: `pip install
    'dora-rl[reasoning-gym]'`, `[pyarrow]` or `[datasets]`."""
    name: str = ""
    """Name of the dataset (`reasoning_gym`), or FILE.py:function (`function`)."""
    path: Path | None = None
    """File to read (`jsonl`, `parquet`); id on the hub, such as `openai/gsm8k`, or folder (`datasets`)."""
    subset: str = ""
    """Subset (configuration) of the data set (`datasets`), such as "main". Empty: its default."""
    split: str = "train"
    """Split of the data set (`datasets`), or a part of it, such as `train[:500]`. Only its files are downloaded. Of a
    task set (`verifiers`): `eval` is every tenth task, `train` are the others, `all` are both."""
    revision: str = ""
    """Branch, tag or commit of an id on the hub (`datasets`). A run records and keeps the commit that it began with.
    Empty: the default branch."""
    prompt: str = "prompt"
    """Column that holds the prompt: a text, or chat messages as a list of {role, content} (needs
    `task.chat_template`)."""
    answer: str = "answer"
    """Column that holds the reference answer, which is passed to the reward. Empty: the rows have none."""
    description: str = ""
    """What the prompts ask for, in a sentence: the terminal, the page and `dora check` show it beside the run."""
    options: dict[str, Any] = Field(default={})
    """Further arguments of the source: parameters of the generator (`arithmetic`, `reasoning_gym`), columns of the rows
    (`seeds`), arguments of the function (`function`), or configuration of the task set for this source alone, in
    addition to `environment.options` (`verifiers`)."""
    weight: Annotated[float, Field(gt=0.0)] = 1.0
    """Share of prompts drawn from this source, relative to the other sources."""
    label: str = ""
    """Label of the source for rewards: `task.rewards[].sources` lists labels, and reward functions receive the label.
    Sources may share a label."""
    advantage: Advantage | None = None
    """How the advantages of this source are computed. Unset: by `objective.advantage`."""


class RewardConfig(Section):
    """One term of the reward; terms are summed with their weights."""

    kind: Literal["math", "exact", "regex", "reasoning_gym", "overlong", "length", "http", "function", "judge"] = (
        "exact"
    )
    """`math`: math-verify compares response and answer. `exact`: 1 if they are equal after stripping. `regex`: 1 if the
    first group of `pattern` equals the answer. `reasoning_gym`: the dataset's own scorer. `overlong`: DAPO's soft
    penalty (arXiv 2503.14476): 0 while at least `buffer` tokens of the token budget are left, then linear to -1.
    `length`: minus the share of the token budget that the response takes. `http`: a POST to `url`. `function`: a
    function of yours that returns a number. It gets those of these arguments that its signature names: prompt=,
    response=, answer=, metadata= (the row's other columns), num_tokens= (of the response), max_tokens= (the token
    budget), finish= ("stop", or "length" if the budget was reached), source= (the label of the row's source) and turns=
    (a list of {"role": "policy" or "environment", "text"}). `judge`: a model gives a score, see docs/DATA.md."""
    pattern: str = ""
    """Regular expression (`regex`, `judge`). In a judge's reply the first group of the last match is the score; empty:
    the number after `Score:`."""
    url: str = ""
    """Endpoint (`http`) that receives {prompt, response, answer, metadata, num_tokens, max_tokens, finish, source,
    turns} and returns {"reward": number}; or base of an API like that of OpenAI (`judge`): http://127.0.0.1:8000/v1."""
    name: str = ""
    """FILE.py:function, or module:function (`function`). A file may import the modules beside it, at its top. Or the
    model at `url` (`judge`)."""
    template: str = ""
    """What a `judge` is asked; {prompt}, {response}, {turns}, {answer}, {source} and {column} of the row stand for
    these. Empty: to compare response and answer (docs/DATA.md)."""
    max_score: Annotated[float, Field(gt=0.0)] = 1.0
    """Highest score of a `judge`. The reward is the score divided by it; a score below 0 or above it is a failure."""
    options: dict[str, Any] = Field(default={})
    """Further fields of each request to a `judge`, such as { temperature = 0.0, max_tokens = 1024 }."""
    api_key_variable: str = "DORA_JUDGE_API_KEY"
    """Environment variable with the key of a `judge`, or, with _FILE appended, with the path of a file that has it. If
    neither is set, no key is sent."""
    concurrency: Positive = 64
    """Maximum number of requests to a `judge` at a time."""
    timeout_s: Seconds = 120.0
    """Time limit of one request to a `judge`. A request that fails is repeated up to 4 times."""
    buffer: Annotated[int, Field(ge=0)] = 0
    """Number of tokens at the end of the token budget over which `overlong` falls to -1."""
    sources: tuple[str, ...] = ()
    """Labels of the sources whose answers this term scores; empty: all. Every source needs a term."""
    weight: float = 1.0
    """Factor by which this term is multiplied."""

    def applies_to(self, source: str) -> bool:
        """Return whether this term scores the answers of a source, by its label."""
        return not self.sources or source in self.sources


class TaskConfig(Section):
    """The prompts, and how answers are scored."""

    sources: tuple[SourceConfig, ...] = (SourceConfig(description=SUMS, options={"max_terms": 48}),)
    """Prompt sources, mixed by their weights."""
    rewards: tuple[RewardConfig, ...] = (RewardConfig(kind="regex", pattern=r"(?:^|\D)(\d\d)$"),)
    """Terms of the reward. Default with an environment: none, so that only the environment gives rewards. Default
    without an environment: a term for the built-in arithmetic; every other source needs a term of its own."""
    system_prompt: str = ""
    """System message put before every prompt (needs a chat template). A row's own system message takes precedence."""
    chat_template: bool = False
    """Render prompts with the chat template of the model folder. If false, prompts are plain text."""
    shuffle: bool = True
    """Shuffle finite sources in every epoch, by the run's seed."""
    epochs: Annotated[int, Field(ge=0)] = 0
    """Number of passes over finite sources; 0: as many as the job needs. The prompts end when the first source does."""
    revisit_share: Annotated[float, Field(ge=0.05, le=1)] = 1.0
    """Share of visits at which a row is sampled again although the rewards of its last group were equal, so that there
    was nothing to learn from it. At the other visits it is passed over. 1: no row is. Less than 1 needs finite sources
    ([DATA.md](DATA.md#rows-that-teach-nothing)). It cannot change within a run."""
    max_prompt_tokens: Positive = 256
    """Maximum number of tokens in a prompt. A row over the limit keeps its position in the stream but is not used; if
    more than half of the first 1,000 rows are over it, that is an error."""
    graders: Positive = 1
    """Number of grader processes."""
    grade_timeout_s: Seconds = 10.0
    """Time limit for grading one answer. A grader that exceeds it is killed, and the trajectory is `grading_failed`,
    which is not the same as reward 0."""
    grader_memory_mb: Positive = 2_048
    """Limit on the memory of one grader together with all processes that it starts, and on the address space of each of
    them. A control group enforces it if the system provides one; otherwise memory is measured every 0.1 s
    ([SECURITY.md](SECURITY.md#rewards)). A grader that exceeds it is killed with all its processes, and the trajectory
    is `grading_failed`."""

    @property
    def description(self) -> str:
        """What the prompts ask for, of all sources that say so."""
        return " ".join(dict.fromkeys(source.description for source in self.sources if source.description))


class McpServerConfig(Section):
    """One MCP server, whose tools the model may call (docs/AGENTS.md): `pip install 'dora-rl[mcp]'`."""

    command: tuple[str, ...] = ()
    """Command that starts the server, as a list of arguments; it speaks MCP on stdin and stdout."""
    url: Annotated[str, Field(pattern=r"^(https?://.+)?$")] = ""
    """Address of a server that runs already (streamable HTTP), in place of `command`."""
    variables: tuple[str, ...] = ()
    """Names of environment variables of the run that the command may see, such as keys. Of all others it sees only what
    a shell needs (`PATH`, `HOME`, ...)."""
    token: str = ""
    """Name of the environment variable with the bearer token that is sent to `url`."""
    tools: tuple[str, ...] = ()
    """Names of the tools that the model may call; empty: all."""
    arguments: dict[str, Any] = Field(default={})
    """Arguments that the model neither sees nor chooses, by name; `{column}` stands for that column of the task's row.
    They are passed to the tools that have them."""
    per_episode: bool = False
    """Whether each episode has a server, or a session, of its own, which costs its start each time. Otherwise the
    episodes of a host share one."""

    @model_validator(mode="after")
    def _has_one_address(self) -> McpServerConfig:
        if bool(self.command) == bool(self.url):
            raise ValueError("needs either command (stdio) or url (streamable HTTP)")
        if self.url and self.variables:
            raise ValueError("variables are for a command; use token for a url")
        if self.command and self.token:
            raise ValueError("token is for a url; use variables for a command")
        return self


class EnvironmentConfig(Section):
    """The environment of episodes with several turns, in processes of its own (docs/ENVIRONMENTS-PROTOCOL.md)."""

    kind: Literal["python", "verifiers", "openenv"] = "python"
    """`python`: an `Environment`. `verifiers`: a task set of that package (docs/AGENTS.md), whose tasks are then the
    default of `task.sources` and `eval.sets`. `openenv`: a server of OpenEnv; seeds are then the default of both."""
    name: str = ""
    """FILE.py:name or module:name of a class or function that makes an `Environment`, once for each episode; the id of
    a task set of verifiers, or its FILE.py; or the address of a server of OpenEnv. Empty: no environment; every episode
    is one answer to its prompt. With `mcp`: only the tools of the servers. An environment needs an extra: `pip install
    'dora-rl[renderers]'`."""
    options: dict[str, Any] = Field(default={})
    """Arguments that the class or function is called with, the configuration of the task set, or what turns and
    observations of the server are (docs/AGENTS.md)."""
    mcp: tuple[McpServerConfig, ...] = ()
    """MCP servers, whose tools a `ToolEnvironment` has in addition to its own."""
    python: str = ""
    """Python interpreter of the hosts (3.11 or later). It needs the packages of your code, but not DORA: only pydantic,
    if you use `ToolEnvironment`; verifiers, uv and msgspec for a task set; openenv-core for its servers. Empty: the
    interpreter of the run."""
    command: tuple[str, ...] = ()
    """Command that starts a host written in another language, as a list of arguments; it replaces `python`
    (docs/ENVIRONMENTS-PROTOCOL.md)."""
    hosts: Positive = 1
    """Number of hosts. Code without `async` shares one CPU core per host."""
    episodes_per_host: Positive = 256
    """Maximum number of episodes in one host. Groups are admitted, and evaluation samples begun, only while all hosts
    together have room for all episodes that are not finished (docs/AGENTS.md)."""
    start_timeout_s: Seconds = 60.0
    """Time in which a host must become ready, your imports included."""
    call_timeout_s: Seconds = 30.0
    """Time limit of one call: of setting up an episode, and of the answer to one turn, with all its tools."""
    memory_mb: Positive = 4_096
    """Limit on the address space of a host and of each process that it starts. A call without `async` that is under way
    takes 2 MB of it."""
    cores: Annotated[int, Field(ge=0)] = 0
    """Number of CPU cores that a host and the processes it starts may use (on Linux); hosts get different ones, from
    the last core down, as long as there are enough. 0: all cores."""
    max_turns: Positive = 16
    """Maximum number of turns in an episode. An episode that reaches it ends there and is truncated."""
    episode_timeout_s: Seconds | None = None
    """Time limit of an episode, measured from its first request, waiting included. A call that is under way then is
    ended; a turn is sampled to its end, and the environment is not called again. The episode is truncated. After a
    resume the time starts again at 0. Unset: no limit; agents that drive themselves need one."""
    renderer: dict[str, Any] = Field(default={})
    """The renderer of the model's family, in the terms of the package `renderers`: `name` and its options, or `name =
    "custom"` and `import_path`. Empty: recognized by the chat template (docs/AGENTS.md)."""
    output_bytes: Annotated[int, Field(ge=1, le=1_000_000)] = 8_192
    """Maximum size of the text of one observation; longer text is cut, with a mark that the model sees. Requests
    of agents that drive themselves are not cut."""

    @model_validator(mode="after")
    def _servers_are_an_environment(self) -> EnvironmentConfig:
        if self.mcp and not self.name:
            object.__setattr__(self, "name", MCP_TOOLS)
        return self

    @property
    def capacity(self) -> int:
        """The number of episodes for which all hosts have room; 0 without an environment."""
        return self.hosts * self.episodes_per_host if self.name else 0

    @property
    def own_prompts(self) -> bool:
        """Whether each episode begins with a prompt of its own, the first request of a program that drives itself."""
        return self.kind == "verifiers" or self.name == AGENT


class EvalSetConfig(Section):
    """One held-out set."""

    name: str = "heldout"
    """Name of the set in metrics."""
    source: SourceConfig = SourceConfig()
    """Source of its prompts. They are never trained."""
    rewards: tuple[RewardConfig, ...] = ()
    """Terms of its reward; empty: those of the task."""
    prompts: Positive = 512
    """Number of prompts to take from the beginning of the source; all of them if it has fewer."""
    samples: Positive = 1
    """n: the number of answers per prompt. mean@n and pass@k are reported."""
    temperature: Annotated[float, Field(ge=0.0)] = 0.0
    """Sampling temperature of evaluation; 0 is greedy."""


class EvalConfig(Section):
    """Evaluation during the run. Version 0 and the last version are always evaluated. It takes at most a tenth of all
    slots while training could use them."""

    sets: tuple[EvalSetConfig, ...] = (
        EvalSetConfig(prompts=128, source=SourceConfig(options={"min_terms": 6, "max_terms": 48})),
    )
    """Held-out sets; empty: no evaluation."""
    every: Annotated[int, Field(ge=0)] = 8
    """Number of steps between evaluations; 0: only at the beginning and at the end. One version is evaluated at a time,
    and one more version is kept and waits for its turn. If a newer version is due before that, the waiting version is
    skipped, and the log, the metrics and the status say so."""


class NodesConfig(Section):
    """Further machines, each of which runs `dora node` (docs/CLUSTER.md)."""

    expected: Annotated[int, Field(ge=0, le=MAX_NODES)] = 0
    """Number of nodes that the run is planned for. It starts once the nodes that train, and enough others for K + 1
    instances, have joined. 0: everything runs on this host."""
    max: Annotated[int, Field(ge=1, le=MAX_NODES)] | None = None
    """Maximum number of nodes; more than `expected` may join and leave while the run goes on. Unset: `expected`."""
    train: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], BeforeValidator(_number_or_auto)] = "auto"
    """Number of nodes with trainer ranks and no servers. `auto`: as many as `trainer.ranks` need with `gpus` each, or
    one on the CPU. 0: the ranks run on this host."""
    gpus: Positive = 8
    """GPUs of a node. They are divided among its servers, or each has a rank."""
    servers: Positive | None = None
    """Number of servers on a node without ranks. Unset: `gpus` ÷ `engine.tensor_parallel`, or 2 on the CPU."""
    address: str = "tcp://127.0.0.1:8423"
    """Address on which this process listens for nodes. They find it by DORA_CONTROLLER (HOST:PORT), and need its
    DORA_TOKEN. Ranks on nodes connect to the same host, at the port of `trainer.address`."""
    store: Literal["relay", "shared"] = "relay"
    """How versions reach the nodes. `relay`: each node has a copy in memory, and passes it on to others. `shared`: the
    run folder is on a file system that all nodes see at the same path."""
    deltas: Annotated[int, Field(ge=0)] = 0
    """Every how many versions a whole one is sent; in between only differences are. It saves bandwidth, not time on
    fast networks, and needs a 16-bit `trainer.publish_dtype`. 0: all are sent whole. With `trainer.lora`, only adapters
    are sent."""
    checkpoints: Path | None = None
    """Folder for the trainer's checkpoints, on storage that all nodes with ranks see at this path. Unset: the run
    folder, to which the files of each rank are copied."""
    tls: Path | None = None
    """Folder with certificate.pem, key.pem and authority.pem, on this host and on each node, for TLS between the relays
    that pass versions and checkpoints on. Requests to servers stay on plain HTTP."""
    lease_s: Seconds = 120.0
    """A node that hears from no controller for this long ends all its processes. A controller gives up the processes of
    a node that it has not heard from for this long, or at once if that host refuses connections."""


class WeightsConfig(Section):
    """The version store."""

    memory_folder: Path = Path("/dev/shm")
    """Memory-backed folder for live versions. The run folder is used instead if it lacks room for K + 4 versions."""
    transfer: Literal["disk", "distributed"] = "disk"
    """How servers receive versions. `disk`: a server reads them from the store's folder, which it must be able to see.
    `distributed`: a process beside the trainer broadcasts them (by gloo, or by NCCL if trainer and server are on GPUs),
    and log-probs or checksums are compared after each push. Data-parallel servers read the folder in both cases."""
    keep: Annotated[int, Field(ge=0)] = 0
    """Number of durable versions to keep in addition to the versions that are still needed: the newest ones. 0 keeps
    all."""


class StatusConfig(Section):
    """The HTTP status endpoint."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: Annotated[int, Field(ge=0, le=65_535)] = 8_421
    """Port of /status, /metrics, /healthz and the page at /; 0 picks a free port."""
    token: str | None = secret("DORA_STATUS_TOKEN")
    """Bearer token required to act on the run, on its page or by `dora instances`; reading needs none. Unset: one is
    generated for every run and written into its folder, readable by its owner only."""


class LogConfig(Section):
    """Logging."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level that is written to `log.jsonl` in the run folder."""
    trajectories_per_step: Annotated[int, Field(ge=0)] = 4
    """Maximum number of trained trajectories per step that are written to `trajectories.jsonl`, with text, tokens,
    log-probs and the terms of the reward. In addition, up to this number of trajectories from groups that were left out
    is written per step, and up to this number per evaluation."""
    trajectories_mb: Annotated[int, Field(ge=0)] = 1024
    """Maximum size of `trajectories.jsonl`, in MiB. Once the file has reached it, no more trajectories are written."""


class TrackingConfig(Section):
    """Experiment trackers: for each one, a process beside the run logs every row of `metrics.jsonl`. It may fail, hang
    or fall behind: the run does not wait for it, and `dora track DIR` logs what is missing
    ([METRICS.md](METRICS.md#trackers))."""

    trackers: tuple[str, ...] = ()
    """Any of `wandb`, `tensorboard` and `trackio`, which are extras (`pip install 'dora-rl[wandb]'`), or
    `FILE.py:Class` or `module:Class` of your own."""
    project: str = "dora"
    """Project that the run belongs to, in trackers with projects."""
    pass_environment: tuple[str, ...] = ()
    """Names of environment variables that trackers receive besides their own (`WANDB_*` for wandb, `TRACKIO_*` and
    `HF_*` for trackio)."""


class Config(Section):
    """All settings of a run."""

    run: RunConfig = RunConfig()
    model: ModelConfig = ModelConfig()
    rollout: RolloutConfig = RolloutConfig()
    engine: EngineConfig = EngineConfig()
    trainer: TrainerConfig = TrainerConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    task: TaskConfig = TaskConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    eval: EvalConfig = EvalConfig()
    weights: WeightsConfig = WeightsConfig()
    nodes: NodesConfig = NodesConfig()
    status: StatusConfig = StatusConfig()
    log: LogConfig = LogConfig()
    tracking: TrackingConfig = TrackingConfig()

    @property
    def max_staleness(self) -> int:
        """K in force; some strategies fix it."""
        return self.rules.max_staleness

    @property
    def rules(self) -> Rules:
        """The strategy as settings of the decision core."""
        rollout = self.rollout
        return rules_of(rollout.strategy, max_staleness=rollout.max_staleness, oversample=rollout.oversample)

    @property
    def longest_request(self) -> int:
        """Tokens of the longest prompt with the whole token budget: what a server must be able to hold."""
        return self.task.max_prompt_tokens + self.rollout.max_new_tokens

    @property
    def replays_routing(self) -> bool:
        """Return whether the trainer replays the engine's choice of experts."""
        return self.objective.router_replay != "off" and self.run.steps > 0

    @property
    def max_row_tokens(self) -> int | None:
        """Maximum number of tokens of all rows of a forked episode together, if the objective needs them in one forward
        pass; otherwise None."""
        if not compares_sequences(self.objective):
            return None
        return max(self.pass_tokens, self.longest_request)

    @property
    def slots(self) -> int | None:
        """Slots of an instance, where they are known before a server is asked."""
        return self.engine.slots or (EMBEDDED_SLOTS if self._starts_embedded else None)

    @property
    def kv_tokens(self) -> int | None:
        """KV capacity of an instance, where it is known before a server is asked."""
        return self.engine.kv_tokens or (EMBEDDED_KV_TOKENS if self._starts_embedded else None)

    @property
    def _starts_embedded(self) -> bool:
        return self.num_managed > 0 and self.engine.kind == "embedded" and not self.engine.command

    @property
    def num_ranks(self) -> int:
        """Number of trainer ranks; 0 if nothing is trained."""
        return self.trainer.ranks if self.run.steps else 0

    @property
    def num_training_nodes(self) -> int:
        """Number of nodes that have ranks; they take the first places."""
        nodes, trainer = self.nodes, self.trainer
        if not self.num_ranks:
            return 0
        if not nodes.expected or nodes.train != "auto":
            return 0 if nodes.train == "auto" else nodes.train
        return -(-trainer.ranks // nodes.gpus) if trainer.device == "cuda" else 1

    @property
    def data_groups(self) -> int:
        """Number of groups of ranks that train different micro-batches."""
        return self.trainer.ranks // (self.trainer.parallel.context * self.trainer.parallel.tensor)

    @property
    def pass_tokens(self) -> int:
        """Maximum number of tokens in one forward pass of such a group."""
        return self.trainer.micro_batch_tokens * self.trainer.parallel.context

    @property
    def longest_slice(self) -> int:
        """Number of tokens of the longest request that one rank computes."""
        return -(-self.longest_request // self.trainer.parallel.context)

    @property
    def shard_ranks(self) -> int:
        """Number of ranks over which one copy of the weights is sharded."""
        return self.trainer.ranks // self.trainer.parallel.replicate

    @property
    def ranks_of_node(self) -> int:
        """Number of ranks of each node that has some."""
        return self.trainer.ranks // self.num_training_nodes

    @property
    def checkpoints_are_copied(self) -> bool:
        """Whether ranks write checkpoints on disks of their nodes, from which they are copied into the run folder."""
        nodes = self.nodes
        return self.num_training_nodes > 0 and nodes.store == "relay" and nodes.checkpoints is None

    @property
    def max_nodes(self) -> int:
        return self.nodes.max or self.nodes.expected

    @property
    def nodes_of_server(self) -> int:
        """Number of nodes over which a server extends."""
        return -(-self.engine.tensor_parallel // self.nodes.gpus) if self.nodes.expected else 1

    @property
    def servers_of_node(self) -> int:
        """Number of servers of a node without ranks, or of as many nodes as one server needs."""
        nodes, engine = self.nodes, self.engine
        if self.nodes_of_server > 1:
            return 1
        return nodes.servers or (
            max(1, nodes.gpus // engine.tensor_parallel) if engine.device == "cuda" else CPU_NODE_SERVERS
        )

    @property
    def num_managed(self) -> int:
        """Number of servers that the run starts."""
        if self.nodes.expected:
            rolling = max(0, self.nodes.expected - self.num_training_nodes)
            return rolling // self.nodes_of_server * self.servers_of_node
        if self.engine.instances is not None:
            return self.engine.instances
        return 0 if self.engine.urls else DEFAULT_INSTANCES

    @property
    def num_instances(self) -> int:
        """Number of servers that the run begins with, external ones included."""
        return len(self.engine.urls) + self.num_managed

    @model_validator(mode="after")
    def _check_across_sections(self) -> Config:
        if found := [*problems(self)]:
            raise ValueError("\n".join(found))
        return self
