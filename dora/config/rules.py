"""Rules that span the fields of a configuration, so that a contradiction is found before anything starts.

Rules within `[objective]` are in `dora/objectives/rules.py`, rules about the terms of a reward in `terms.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dora.config.terms import term_problems
from dora.core.strategies import SILENCE
from dora.objectives.rules import problems as objective_problems

if TYPE_CHECKING:
    from dora.config.schema import Config

#: The address of a server, and the address on which the controller listens (ZeroMQ resolves wildcards and interfaces).
_SERVER_URL = re.compile(r"https?://[^\s/]+(/\S*)?")
_LISTEN_ADDRESS = re.compile(r"tcp://\S+:(?:(\d{1,5})|\*)")
_MAX_PORT = 65_535
#: The index of a prompt's source is one byte.
_MAX_SOURCES = 256
#: Placeholders that `engine.command` may use.
_PLACEHOLDERS = (
    *("model", "host", "port", "tp", "slots", "kv_tokens", "dtype", "device", "threads"),
    *("nodes", "node_rank", "master"),
)
#: Trackers with a name of their own.
_TRACKERS = ("wandb", "tensorboard", "trackio")


def problems(config: Config) -> Iterator[str]:
    """Yield one line for each problem."""
    yield from _algorithm_problems(config)
    yield from _optimizer_problems(config)
    yield from _lora_problems(config)
    yield from _served_adapter_problems(config)
    yield from _capacity_problems(config)
    yield from _address_problems(config)
    yield from _rank_problems(config)
    yield from _node_problems(config)
    yield from _template_problems(config)
    yield from _source_problems(config)
    yield from _evaluation_problems(config)
    yield from _reward_problems(config)
    yield from _environment_problems(config)
    yield from _tracking_problems(config)
    yield from _path_problems(config)


def _algorithm_problems(config: Config) -> Iterator[str]:
    yield from objective_problems(
        config.objective, updates=config.trainer.updates, group_size=config.rollout.group_size
    )
    if config.rollout.groups_per_step % config.trainer.updates:
        yield (
            f"trainer.updates: {config.trainer.updates} updates cannot share the {config.rollout.groups_per_step} "
            "groups of a step (rollout.groups_per_step) equally"
        )
    if config.trainer.copies == "host" and config.trainer.device == "cpu":
        yield "trainer.copies: with trainer.device = cpu, the copies are on the host anyway; use device"
    if SILENCE * config.rollout.watchdog_s >= config.run.no_progress_s:
        yield (
            f"rollout.watchdog_s: {SILENCE:g} x {config.rollout.watchdog_s:g} s must be below run.no_progress_s "
            f"({config.run.no_progress_s:g} s), otherwise a stuck request ends the run before it can be moved"
        )


def _optimizer_problems(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.optimizer_state == "host" and trainer.device == "cpu":
        yield "trainer.optimizer_state: with trainer.device = cpu, the moments are on the host anyway; use device"
    if trainer.optimizer == "muon" and trainer.optimizer_state != "device":
        yield (
            f"trainer.optimizer_state: {trainer.optimizer_state} is for adamw; the momentum of muon, 4 bytes for "
            "each parameter, is on the device in float32; use device"
        )
    beta1, beta2 = trainer.betas
    if trainer.optimizer_state == "8bit" and beta1**2 >= beta2:
        yield (
            f"trainer.optimizer_state: 8bit needs beta1² < beta2, which bounds the steps ({beta1}, {beta2}); raise the "
            "second of trainer.betas, or use device"
        )
    if trainer.compile and trainer.activation_checkpointing in ("selective", "auto"):
        yield (
            f"trainer.compile: {trainer.activation_checkpointing} checkpointing may keep tensors that compiled "
            "layers write in place; set trainer.activation_checkpointing to none or full"
        )
    for key in ("expert", "tensor"):
        if trainer.compile and getattr(trainer.parallel, key) > 1:
            yield f"trainer.compile: not with trainer.parallel.{key}, where layers gather weights; remove one of them"
    if trainer.schedule == "constant" and trainer.min_learning_rate:
        yield "trainer.min_learning_rate: has no effect with trainer.schedule = constant; remove it, or use cosine"


def _lora_problems(config: Config) -> Iterator[str]:
    trainer, lora = config.trainer, config.trainer.lora
    if not lora.rank:
        for key, field in type(lora).model_fields.items():
            if getattr(lora, key) != field.default:
                yield f"trainer.lora.{key}: has no effect with trainer.lora.rank = 0; remove it, or set a rank"
        if config.model.adapter:
            yield (
                "model.adapter: only a run that trains an adapter begins with one; set trainer.lora.rank to its rank, "
                "or merge it into model.path"
            )
        return
    if not lora.targets or "all-linear" in lora.targets:
        yield (
            "trainer.lora.targets: write out the names of the linear modules, such as q_proj; all-linear would adapt "
            "routers and experts too"
        )
    if trainer.optimizer == "muon":
        yield (
            "trainer.optimizer: muon would orthogonalize the two matrices of an adapter one by one, not their product; "
            "use adamw"
        )
    if trainer.optimizer_state != "device":
        yield (
            f"trainer.optimizer_state: with trainer.lora, only an adapter has moments, too few for "
            f"{trainer.optimizer_state} to save memory; use device"
        )
    if trainer.parallel.tensor > 1:
        yield "trainer.parallel.tensor: not with trainer.lora, whose matrices it would have to divide too; set it to 1"


def may_serve_adapters(config: Config) -> bool:
    """Return whether a run that trains an adapter could have `engine.adapters`."""
    return config.rules.in_flight is None and config.weights.transfer == "disk"


def _served_adapter_problems(config: Config) -> Iterator[str]:
    if not config.engine.adapters:
        return
    if not config.trainer.lora.rank:
        yield "engine.adapters: versions are adapters only if one is trained; set trainer.lora.rank, or remove it"
    if config.rules.in_flight is not None:
        yield (
            f"engine.adapters: {config.rollout.strategy} changes the weights under running requests, which an adapter "
            "that is loaded beside theirs does not; remove it"
        )
    if config.weights.transfer != "disk":
        yield "weights.transfer: servers read adapters from folders; with engine.adapters, set it to disk"


def _capacity_problems(config: Config) -> Iterator[str]:
    needed = 1 if config.engine.adapters else config.max_staleness + 1
    if config.run.steps and config.rollout.strategy == "dora" and 0 < config.num_instances < needed:
        more = "list more engine.urls" if not config.num_managed else "raise engine.instances"
        more = "raise nodes.expected or nodes.servers" if config.nodes.expected else more
        yield (
            f"rollout.max_staleness: K = {config.max_staleness} keeps up to {config.max_staleness + 1} versions alive, "
            f"but there are {config.num_instances} instances; lower K or {more}"
        )
    longest = config.longest_request
    if config.kv_tokens is not None and longest > config.kv_tokens:
        yield (
            f"engine.kv_tokens: {config.kv_tokens} cannot hold the longest prompt plus the token budget "
            f"({longest} tokens: task.max_prompt_tokens + rollout.max_new_tokens)"
        )


def _address_problems(config: Config) -> Iterator[str]:
    for url in config.engine.urls:
        if not _SERVER_URL.fullmatch(url):
            yield f"engine.urls: {url} is not a server address; write it as http://HOST:PORT"
    for url in sorted({url for url in config.engine.urls if config.engine.urls.count(url) > 1}):
        yield f"engine.urls: {url} is listed twice; a server is one instance and holds one version at a time"
    if config.engine.api_key is not None and not config.engine.api_key.isascii():
        yield "engine.api_key: servers compare keys of ASCII characters only; set another DORA_ENGINE_API_KEY"
    if not config.num_instances and not config.nodes.expected:
        yield "engine.instances: 0 leaves the run without a server; raise it or give engine.urls"
    if not _may_listen(config.trainer.address):
        yield f"trainer.address: cannot listen on {config.trainer.address}; write it as tcp://HOST:PORT"


def _may_listen(address: str) -> bool:
    found = _LISTEN_ADDRESS.fullmatch(address)
    return found is not None and int(found[1] or 0) <= _MAX_PORT


def _rank_problems(config: Config) -> Iterator[str]:
    ranks, copies = config.trainer.ranks, config.trainer.parallel.replicate
    if ranks % copies:
        yield f"trainer.parallel.replicate: {ranks} trainer.ranks cannot be divided into {copies} equal groups"
    else:
        yield from _group_problems(config)
        yield from _matrix_problems(config)
    if (fewest := config.trainer.min_ranks) is not None:
        if config.num_training_nodes < 2:
            yield "trainer.min_ranks: no rank is left if the only host with ranks is lost; remove it"
        elif fewest > ranks:
            yield f"trainer.min_ranks: {fewest} is more than trainer.ranks ({ranks})"


def _group_problems(config: Config) -> Iterator[str]:
    parallel, nodes = config.trainer.parallel, config.num_training_nodes
    groups = {
        "expert": (parallel.expert, "experts"),
        "context": (parallel.context, "sequences"),
        "tensor": (parallel.tensor, "matrices"),
    }
    if len(divided := [f"trainer.parallel.{key}" for key, (size, _) in groups.items() if size > 1]) > 1:
        yield f"{divided[0]}: not together with {divided[1]}; set one of them to 1"
    for key, (size, what) in groups.items():
        ranks = f"trainer.parallel.{key}: {size} ranks that divide {what}"
        if config.shard_ranks % size:
            yield f"{ranks} must divide the {config.shard_ranks} ranks of a copy of the weights"
        elif key != "expert" and nodes and not config.trainer.ranks % nodes and config.ranks_of_node % size:
            yield f"{ranks} must be on one node, and a node has {config.ranks_of_node} ranks"


def _matrix_problems(config: Config) -> Iterator[str]:
    if config.trainer.parallel.tensor == 1:
        return
    if config.trainer.optimizer == "muon":
        yield "trainer.parallel.tensor: not with trainer.optimizer = muon, which needs whole rows; use adamw"
    if config.trainer.optimizer_state == "8bit":
        yield "trainer.parallel.tensor: not with trainer.optimizer_state = 8bit, whose blocks it would cut; use device"


def _node_problems(config: Config) -> Iterator[str]:
    nodes, training = config.nodes, config.num_training_nodes
    if not nodes.expected:
        return
    if not _may_listen(nodes.address):
        yield f"nodes.address: cannot listen on {nodes.address}; write it as tcp://HOST:PORT"
    if config.max_nodes < nodes.expected:
        yield f"nodes.max: {nodes.max} is less than nodes.expected ({nodes.expected})"
    if training > nodes.expected:
        yield f"nodes.train: {training} of {nodes.expected} nodes (nodes.expected) cannot train"
    elif training == nodes.expected and not config.engine.urls:
        yield (
            f"nodes.expected: {training} nodes train and none is left to roll out; raise it, or lower nodes.train "
            "(0: the ranks run on this host)"
        )
    elif training and config.trainer.ranks % training:
        yield f"nodes.train: {config.trainer.ranks} trainer.ranks cannot be divided equally among {training} nodes"
    needed = config.servers_of_node * config.engine.tensor_parallel
    if (several := config.nodes_of_server) > 1:
        yield from _wide_server_problems(config, several)
    elif config.engine.device == "cuda" and needed > nodes.gpus:
        yield (
            f"nodes.servers: {config.servers_of_node} servers need {needed} GPUs, and a node has {nodes.gpus} "
            "(nodes.gpus); lower it"
        )
    if config.engine.instances is not None:
        yield "engine.instances: with nodes, nodes.servers says how many servers each has; remove it"
    if config.engine.gpus:
        yield "engine.gpus: with nodes, the GPUs of a node are divided among its servers; remove it"
    if nodes.store == "relay" and config.weights.transfer == "distributed":
        yield "weights.transfer: distributed needs nodes.store = shared: senders read this host's folder"
    if nodes.deltas and config.trainer.publish_dtype == "float32":
        yield "nodes.deltas: differences of float32 weights are half as large as the weights; set it to 0"


def _wide_server_problems(config: Config, several: int) -> Iterator[str]:
    """Yield what is wrong with servers over several nodes."""
    nodes, each = config.nodes, config.engine.tensor_parallel
    if each % nodes.gpus:
        yield f"engine.tensor_parallel: {each} GPUs cannot be divided among nodes of {nodes.gpus} (nodes.gpus)"
    if nodes.servers not in (None, 1):
        yield f"nodes.servers: a server of {each} GPUs takes {several} nodes of {nodes.gpus} (nodes.gpus); remove it"
    for name, count in (("expected", nodes.expected), ("max", config.max_nodes)):
        rolling = count - config.num_training_nodes
        if rolling > 0 and rolling % several:
            yield (
                f"nodes.{name}: {rolling} nodes without ranks cannot be divided into servers of {several} nodes "
                f"({each} GPUs: engine.tensor_parallel)"
            )


def _template_problems(config: Config) -> Iterator[str]:
    engine = config.engine
    for name in sorted(set(re.findall(r"\{([a-z_]+)\}", " ".join((*engine.command, *engine.args))))):
        if name not in _PLACEHOLDERS:
            known = ", ".join(f"{{{known}}}" for known in _PLACEHOLDERS)
            yield f"engine.command: unknown placeholder {{{name}}}; known are {known}"
    needed = config.num_managed * engine.tensor_parallel
    if engine.gpus and len(engine.gpus) < needed:
        yield (
            f"engine.gpus: {len(engine.gpus)} listed, but {config.num_managed} instances of engine.tensor_parallel = "
            f"{engine.tensor_parallel} need {needed}; list a GPU several times to share it"
        )
    if engine.kind == "embedded" and not engine.command and engine.tensor_parallel > 1:
        yield "engine.tensor_parallel: the embedded engine uses one GPU; set it to 1, or engine.kind to sglang"
    if engine.kind != "embedded" or engine.command:
        for name in ("min_step_ms", "draft_tokens"):
            if getattr(engine, name):
                yield f"engine.{name}: only the embedded engine has it; set it to 0, or engine.kind to embedded"
    elif engine.draft_tokens and config.replays_routing:
        yield (
            "engine.draft_tokens: an engine that returns the choice of experts does not draft; set it to 0, or "
            "objective.router_replay to off"
        )


def _source_problems(config: Config) -> Iterator[str]:
    sources = {f"task.sources.{i}": source for i, source in enumerate(config.task.sources)}
    sources |= {f"eval.sets.{i}.source": one.source for i, one in enumerate(config.eval.sets)}
    for field, source in sources.items():
        if source.kind == "datasets":
            if source.path is None:
                yield f"{field}.path: kind 'datasets' needs an id on the hub, such as openai/gsm8k, or a folder"
            if source.options:
                yield f"{field}.options: kind 'datasets' has none; use subset, split and revision"
        elif source.subset or source.revision:
            yield f"{field}: subset and revision are for kind 'datasets', not for '{source.kind}'; remove them"
        if source.kind not in ("datasets", "verifiers") and source.split != "train":
            yield f"{field}.split: is for kinds 'datasets' and 'verifiers', not for '{source.kind}'; remove it"
    if config.task.revisit_share < 1 and not config.rollout.filter_zero_variance:
        yield (
            "task.revisit_share: rollout.filter_zero_variance = false trains groups of equal rewards, so no row is "
            "passed over for them; set one of the two back to its default"
        )


def _evaluation_problems(config: Config) -> Iterator[str]:
    names = [s.name for s in config.eval.sets]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield f"eval.sets: two sets are named '{name}'"
    trained = {source.kind for source in config.task.sources}
    if not trained:
        yield "task.sources: at least one source is needed"
        return
    if len(config.task.sources) > _MAX_SOURCES:
        yield f"task.sources: {len(config.task.sources)} sources; at most {_MAX_SOURCES} can be mixed"
    for index, held_out in enumerate(config.eval.sets):
        if held_out.source.kind == "arithmetic" and "arithmetic" not in trained:
            yield (
                f"eval.sets.{index}: evaluates the built-in arithmetic, which is not the task; "
                "give a held-out set of the task, or turn evaluation off with eval.sets = []"
            )


def _reward_problems(config: Config) -> Iterator[str]:
    task, held_out = config.task, list(enumerate(config.eval.sets))
    budget = config.rollout.max_new_tokens
    labels = {f"task.sources.{i}": source.label for i, source in enumerate(task.sources)}
    labels |= {f"eval.sets.{i}.source": one.source.label for i, one in held_out if not one.rewards}
    yield from term_problems("task.rewards", task.rewards, labels=labels, budget=budget)
    if "rewards" not in task.model_fields_set:
        for index, source in enumerate(task.sources):
            if source.kind not in ("arithmetic", "seeds"):
                yield (
                    f"task.rewards: nothing scores the answers to task.sources.{index}; add a term, such as "
                    '[[task.rewards]] with kind = "math" (--reward math)'
                )
    for i, one in held_out:
        label = {f"eval.sets.{i}.source": one.source.label}
        yield from term_problems(f"eval.sets.{i}.rewards", one.rewards, labels=label, budget=budget)


def _tracking_problems(config: Config) -> Iterator[str]:
    titles = [name.rpartition(":")[2] for name in config.tracking.trackers]
    for name in config.tracking.trackers:
        if name not in _TRACKERS and ":" not in name:
            yield f"tracking.trackers: no tracker '{name}'; use {', '.join(_TRACKERS)} or FILE.py:Class"
    for title in sorted({title for title in titles if titles.count(title) > 1}):
        yield f"tracking.trackers: {title} is listed twice"


def _path_problems(config: Config) -> Iterator[str]:
    folders = {
        "run.folder": config.run.folder,
        "weights.memory_folder": config.weights.memory_folder,
        "nodes.checkpoints": config.nodes.checkpoints,
        "nodes.tls": config.nodes.tls,
    }
    for field, folder in folders.items():
        if folder is not None and folder.parts[:1] == ("~",):
            yield f"{field}: {folder} would be below a folder named ~ here; write the path in full"


def _task_set_problems(config: Config) -> Iterator[str]:
    environment, task = config.environment, config.task
    sources = {f"task.sources.{i}": source for i, source in enumerate(task.sources)}
    sets = {f"eval.sets.{i}.source": one.source for i, one in enumerate(config.eval.sets)}
    if environment.kind != "verifiers":
        for field in (field for field, source in (sources | sets).items() if source.kind == "verifiers"):
            yield f'{field}.kind: tasks of verifiers are played by their task set; set environment.kind to "verifiers"'
        return
    if not environment.name:
        yield "environment.name: kind 'verifiers' needs the id of a task set, or its FILE.py"
    if environment.command:
        yield "environment.command: kind 'verifiers' has a host of its own; remove the command"
    for field, source in (sources | sets).items():
        splits = ("train", "all") if field in sources else ("eval", "all")
        if source.kind != "verifiers":
            yield f"{field}.kind: '{source.kind}' has no tasks of the task set {environment.name}; use kind 'verifiers'"
        elif source.split not in splits:
            yield f"{field}.split: kind 'verifiers' has {' or '.join(splits)} here, not '{source.split}'"
        elif field in sets and any(
            "all" in (source.split, one.split) and one.options == source.options for one in task.sources
        ):
            yield f"{field}: task.sources trains on the same tasks; give it other options, or use splits train and eval"


def _openenv_problems(config: Config) -> Iterator[str]:
    environment = config.environment
    if environment.kind != "openenv":
        return
    if not environment.name.startswith(("http://", "https://")):
        yield f"environment.name: expected the http:// or https:// address of a server, got '{environment.name}'"
    if environment.command:
        yield "environment.command: kind 'openenv' has a host of DORA; remove the command"


def _environment_problems(config: Config) -> Iterator[str]:
    environment = config.environment
    yield from _task_set_problems(config)
    yield from _openenv_problems(config)
    if environment.kind != "python" and environment.mcp:
        yield f"environment.mcp: kind '{environment.kind}' has tools of its own; remove the servers"
    if not environment.name:
        if environment.kind == "python" and any(source.kind == "seeds" for source in config.task.sources):
            yield "task.sources: rows of kind seeds have no prompt; name an environment that draws one"
        if environment.command:
            yield "environment.name: is empty, so there is no environment and environment.command has no effect"
        if config.objective.turn_rewards != "sum":
            yield "objective.turn_rewards: has no effect without environment.name; remove the key"
        return
    if environment.kind == "python" and ":" not in environment.name and not environment.command:
        yield f"environment.name: expected FILE.py:name or module:name, got '{environment.name}'"
    if environment.capacity < config.rollout.group_size:
        yield (
            f"environment.episodes_per_host: {environment.hosts} x {environment.episodes_per_host} episodes are "
            f"fewer than one group has (rollout.group_size = {config.rollout.group_size}); raise it"
        )
    if environment.command and environment.python:
        yield "environment.python: has no effect with environment.command; remove one of them"
    if environment.command and environment.mcp:
        yield "environment.mcp: is served by hosts of DORA alone; remove it or environment.command"
    if environment.call_timeout_s >= config.run.no_progress_s:
        yield (
            f"environment.call_timeout_s: {environment.call_timeout_s:g} s must be below run.no_progress_s "
            f"({config.run.no_progress_s:g} s), otherwise a call that hangs ends the run"
        )
    if environment.own_prompts and environment.episode_timeout_s is None:
        yield (
            "environment.episode_timeout_s: agents that drive themselves need one, because an agent that goes on for "
            "ever would keep its version and the trainer waiting; set the longest time of an episode in seconds"
        )
