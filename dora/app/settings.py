"""Maps the configuration to the settings of the core, the trainer and the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec

from dora.app.inputs import model_bytes
from dora.config.schema import Config, RolloutConfig
from dora.core.strategies import Settings, rules_of
from dora.journal.run_folder import RunFolder
from dora.observe.drift import DriftWatch, Precision
from dora.section import Section
from dora.sim.answers import cap_of
from dora.sim.server import SimulatedServer
from dora.sim.workload import AdapterModel, AdapterUse, FleetModel, JobModel, LengthModel, TrainerModel, Workload
from dora.transport.messages import Configure, LoraSettings, TrainerSettings
from dora.weights.file_plan import ITEM_BYTES
from dora.weights.merging import is_weights
from dora.weights.tensors import tensors_of

#: Number of versions for which the store needs room in addition to the K + 1 live versions: one that is being
#: evaluated, one that is being published, and one that a push is reading.
SPARE_VERSIONS = 3
#: Maximum number of stale tokens per rank, prompts included, that a probe measures.
PROBE_TOKENS = 512


def settings_of(config: Config, *, eval_prompt_tokens: Sequence[int]) -> Settings:
    """Return the settings of the decision core."""
    rollout, trainer = config.rollout, config.trainer
    return Settings(
        rules=config.rules,
        steps=config.run.steps,
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        max_new_tokens=config.longest_request if config.environment.own_prompts else rollout.max_new_tokens,
        num_ranks=config.data_groups,
        micro_batch_tokens=config.pass_tokens,
        updates=trainer.updates,
        shared_prompts=trainer.shared_prompts != "off",
        filter_zero_variance=rollout.filter_zero_variance,
        max_top_up=rollout.max_top_up,
        watchdog_s=rollout.watchdog_s,
        no_progress_s=config.run.no_progress_s,
        call_limit_s=config.environment.call_timeout_s if config.environment.name else 0.0,
        max_episodes=config.environment.capacity,
        eval_prompt_tokens=tuple(eval_prompt_tokens),
        eval_every=config.eval.every,
        # Fewer ranks add in another order, so that what they write again differs by rounding.
        deterministic=trainer.device == "cpu" and trainer.min_ranks in (None, trainer.ranks),
        adapters=config.engine.adapters,
        own_prompts=config.environment.own_prompts,
    )


def live_bytes(config: Config, model: Path) -> int:
    """Return the size of all versions that may be live at once."""
    bases = 1 if config.nodes.deltas else 0
    return (config.max_staleness + 1 + SPARE_VERSIONS + bases) * version_bytes(config, model)


def version_bytes(config: Config, model: Path) -> int:
    """Return the largest size of a version: twice that of the model's files, which may be in FP8, or of its adapter."""
    if not config.engine.adapters:
        return 2 * model_bytes(model)
    lora = config.trainer.lora
    shapes = (
        tensor.shape
        for name, tensor in tensors_of(model).items()
        if name.removesuffix(".weight").rpartition(".")[2] in lora.targets and len(tensor.shape) == 2
    )
    matrices = ITEM_BYTES["F32"] * lora.rank * sum(map(sum, shapes))
    others = sum(path.stat().st_size for path in model.iterdir() if path.is_file() and not is_weights(path.name))
    return 2 * (matrices + others)


def rollout_only_settings(settings: Settings) -> Settings:
    """Turn the whole job into one step under version 0, which is the model, without evaluation."""
    return msgspec.structs.replace(
        settings,
        rules=rules_of("periodic", max_staleness=0),
        steps=1,
        groups_per_step=settings.groups_per_step * settings.steps,
        updates=1,
        num_ranks=1,
        eval_prompt_tokens=(),
        adapters=False,
    )


def evaluation_settings(settings: Settings) -> Settings:
    """Turn the job into the evaluation of version 0, which is a whole model, without a step."""
    return msgspec.structs.replace(
        settings,
        rules=rules_of("periodic", max_staleness=0),
        steps=0,
        updates=1,
        num_ranks=1,
        eval_every=0,
        adapters=False,
    )


def trainer_settings(config: Config, *, max_staleness: int) -> TrainerSettings:
    """Return the settings of the trainer ranks."""
    beta1, beta2 = config.trainer.betas
    samples_once = config.rules.in_flight is None  # otherwise tokens of a group may be sampled under several versions
    have_versions = config.num_training_nodes < 2 or config.nodes.store == "shared"  # all ranks have those they probe
    return TrainerSettings(
        **(_common(config.trainer, TrainerSettings) | {"lora": lora_settings(config)}),
        shard_ranks=config.shard_ranks if config.trainer.parallel.replicate > 1 else 0,
        expert_ranks=config.trainer.parallel.expert,
        context_ranks=config.trainer.parallel.context,
        tensor_ranks=config.trainer.parallel.tensor,
        beta1=beta1,
        beta2=beta2,
        probe_tokens=PROBE_TOKENS if config.trainer.probe_every and samples_once and have_versions else 0,
        steps=config.run.steps,
        longest_request=config.longest_request,
        objective=config.objective.model_dump_json(),
        advantages=_advantages(config),
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        serves_adapters=config.engine.adapters,
        max_staleness=max_staleness,
        sends_logprobs=config.log.trajectories_per_step > 0,
    )


def lora_settings(config: Config) -> LoraSettings | None:
    """Return the adapter that is trained; None if all weights are."""
    lora = config.trainer.lora
    if not lora.rank:
        return None
    return LoraSettings(**lora.model_dump(), seed=config.run.seed, begins_with=config.model.adapter)


def drift_watch(config: Config) -> DriftWatch:
    """Return the drift alarms for a run's metrics."""
    return DriftWatch(
        precision=precision_of(config),
        updates=config.trainer.updates,
        clips_many=config.objective.loss.CLIPS_MANY,
    )


def precision_of(config: Config) -> Precision:
    """Return the coarser data type of trainer and published weights."""
    coarse = "bfloat16" in (config.trainer.dtype, config.trainer.publish_dtype)
    return "bfloat16" if coarse else "float32"


def _advantages(config: Config) -> tuple[str, ...]:
    """Return the kind of advantage of each source; empty if all sources have the kind of the objective."""
    own = [source.advantage for source in config.task.sources]
    return tuple(kind or config.objective.advantage for kind in own) if any(own) else ()


#: Trainer settings that do not affect the result of a wave, except for rounding.
_WITHOUT_EFFECT = (
    "threads",
    "shard_ranks",
    "expert_ranks",
    "context_ranks",
    "tensor_ranks",
    "shared_prompts",
    "activation_checkpointing",
    "compile",
    "serves_adapters",
    "sends_logprobs",
    "max_staleness",
    "checkpoint_every",
    "copies",
    "probe_tokens",
    "probe_every",
    "micro_batch_tokens",
    "longest_request",
)


def lineage_settings(config: Config) -> bytes:
    """Return the settings that affect the result of a wave, as canonical JSON."""
    settings = msgspec.to_builtins(trainer_settings(config, max_staleness=0))
    without = (*_WITHOUT_EFFECT, "steps") if config.trainer.schedule == "constant" else _WITHOUT_EFFECT
    return msgspec.json.encode({k: v for k, v in settings.items() if k not in without}, order="sorted")


@dataclass(frozen=True, slots=True, kw_only=True)
class RankPaths:
    """What a rank reads and writes, as absolute paths on its host."""

    model: Path
    reference: Path | None  #: of the reference policy; None: version 0
    adapter: Path | None  #: that version 0 has; None: none
    memory_root: Path
    durable_root: Path
    checkpoints: Path  #: folder of this run's checkpoints
    fence: Path
    resume_from: tuple[Path, ...] = ()  #: checkpoints, best first
    ranks_here: tuple[int, ...] = ()  #: ranks with the same `checkpoints`; (): all
    owns_checkpoints: bool = False  #: whether the controller cannot delete in `checkpoints`

    @classmethod
    def here(
        cls,
        folder: RunFolder,
        *,
        model: Path,
        memory_root: Path,
        reference: Path | None = None,
        adapter: Path | None = None,
        resume_from: Sequence[Path] = (),
    ) -> Self:
        """Return the paths of ranks on the controller's host."""
        return cls(
            model=model,
            reference=reference,
            adapter=adapter,
            memory_root=memory_root.resolve(),
            durable_root=folder.versions.resolve(),
            checkpoints=folder.checkpoints.resolve(),
            fence=folder.fence.resolve(),
            resume_from=tuple(path.resolve() for path in resume_from),
        )


def configure_message(
    config: Config,
    paths: RankPaths,
    *,
    run_id: str,
    may_start_over: bool,
    chain: str,
    epoch: int,
    max_staleness: int,
) -> Configure:
    """Return the first message to a rank, to which reference policy and first adapter are folders of its host."""
    if paths.reference is not None:
        objective = config.objective.model_copy(update={"kl_reference": str(paths.reference)})
        config = config.model_copy(update={"objective": objective})
    if paths.adapter is not None:
        model = config.model.model_copy(update={"adapter": str(paths.adapter)})
        config = config.model_copy(update={"model": model})
    return Configure(
        run_id=run_id,
        model_path=str(paths.model),
        settings=trainer_settings(config, max_staleness=max_staleness),
        memory_root=str(paths.memory_root),
        durable_root=str(paths.durable_root),
        checkpoints=str(paths.checkpoints),
        resume_from=tuple(map(str, paths.resume_from)),
        ranks_here=paths.ranks_here,
        owns_checkpoints=paths.owns_checkpoints,
        may_start_over=may_start_over,
        chain=chain,
        epoch=epoch,
        fence=str(paths.fence),
    )


#: Regime of answer lengths for a configuration, which has no lengths; scaled so that the token budget cuts 1 % of
#: answers.
CONFIG_REGIME: Final = "A"
REGIME_P99: Final = 2_447


def workload_of(config: Config) -> Workload:
    """Return a workload for the simulator, with example lengths and rates (`dora simulate --from` measures them)."""
    rollout, engine, trainer = config.rollout, config.engine, config.trainer
    rollout_devices = config.num_instances * engine.tensor_parallel
    known: dict[str, Any] = {"slots": config.slots, "kv_tokens": config.kv_tokens}
    return Workload(
        job=JobModel(**_common(rollout, JobModel), steps=config.run.steps),
        lengths=LengthModel(
            regime=CONFIG_REGIME,
            cap=min(rollout.max_new_tokens, cap_of(CONFIG_REGIME)),
            scale=min(1.0, rollout.max_new_tokens / REGIME_P99),
            prompt_tokens=config.task.max_prompt_tokens,
        ),
        fleet=FleetModel(
            devices=rollout_devices + trainer.ranks,
            rollout_devices=rollout_devices,
            devices_per_instance=engine.tensor_parallel,
            server=SimulatedServer(**{name: value for name, value in known.items() if value is not None}),
        ),
        adapters=AdapterModel(use=adapter_use(config)),
        train=TrainerModel(
            devices_per_rank=trainer.ranks // config.data_groups,
            micro_batch_tokens=config.pass_tokens,
            updates=trainer.updates,
        ),
    )


def adapter_use(config: Config) -> AdapterUse:
    """Return what becomes of the adapter that a run trains."""
    if not config.trainer.lora.rank:
        return "none"
    return "served" if config.engine.adapters else "merged"


def rollout_section(job: JobModel) -> dict[str, Any]:
    """Return a workload's job as settings of `rollout`; the inverse of `workload_of`."""
    return {name: getattr(job, name) for name in job.__struct_fields__ if name in RolloutConfig.model_fields}


def _common(section: Section, target: type[msgspec.Struct]) -> dict[str, Any]:
    """Return the settings of `section` whose names are also fields of `target`."""
    return {name: getattr(section, name) for name in target.__struct_fields__ if name in type(section).model_fields}
