"""Mapping the configuration to the settings of the core, the trainer and the simulator."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.app.settings import rollout_section, settings_of, trainer_settings, workload_of
from dora.config.load import load
from dora.config.schema import Config

CHANGED = (
    "run.steps=7",
    "rollout.strategy=partial_bounded",
    "rollout.oversample=1.25",
    "rollout.groups_per_step=5",
    "rollout.group_size=3",
    "rollout.filter_zero_variance=false",
    "rollout.max_top_up=7",
    "trainer.micro_batch_tokens=999",
    "trainer.ranks=4",
    "trainer.parallel.context=2",
)


def config(*changes: str) -> Config:
    return load(None, changes, environ={})


def test_a_config_is_simulated_with_the_settings_of_its_run() -> None:
    """Except evaluation, a timeout that simulations do not have, what depends on the trainer's device, shared prompts,
    as the simulated trainer computes every prompt, and the time of a prefill, which is the simulated server's own."""
    ours = settings_of(config(*CHANGED), eval_prompt_tokens=())
    simulated = workload_of(config(*CHANGED)).settings()
    differing = {name for name in ours.__struct_fields__ if getattr(ours, name) != getattr(simulated, name)}
    assert differing == {"eval_every", "no_progress_s", "deterministic", "shared_prompts", "prefill_s_per_token"}


def test_ranks_that_divide_sequences_count_as_one_with_their_tokens_together() -> None:
    ours = settings_of(config(*CHANGED), eval_prompt_tokens=())
    assert (ours.num_ranks, ours.micro_batch_tokens) == (2, 2 * 999)
    assert trainer_settings(config(*CHANGED), max_staleness=0).micro_batch_tokens == 999


@pytest.mark.parametrize(
    ("changes", "same"),
    [
        ((), True),
        (("trainer.min_ranks=2",), True),
        (("trainer.min_ranks=1",), False),
        (("trainer.device=cuda",), False),
    ],
)
def test_the_same_bytes_are_expected_of_a_step_that_is_trained_again_unless_ranks_may_be_fewer_or_gpus(
    changes: tuple[str, ...], same: bool
) -> None:
    nodes = ("trainer.ranks=2", "nodes.train=2", "nodes.expected=5") if changes and "min_ranks" in changes[0] else ()
    assert settings_of(config(*nodes, *changes), eval_prompt_tokens=()).deterministic == same


def test_the_rollout_section_of_a_job_is_that_of_its_config() -> None:
    rollout = config(*CHANGED).rollout
    there = rollout_section(workload_of(config(*CHANGED)).job)
    assert there == {name: getattr(rollout, name) for name in there}
    assert len(there) == 7


def test_the_ranks_receive_the_trainer_section() -> None:
    received = trainer_settings(
        config("trainer.betas.1=0.5", "run.steps=9", "rollout.temperature=0.7"), max_staleness=4
    )
    assert (received.beta2, received.steps, received.temperature, received.max_staleness) == (0.5, 9, 0.7, 4)
    assert received.micro_batch_tokens == config().trainer.micro_batch_tokens
    assert received.longest_request == config().longest_request


def test_the_ranks_receive_an_adapter_only_if_there_is_one() -> None:
    assert trainer_settings(config(), max_staleness=2).lora is None
    received = trainer_settings(config("trainer.lora.rank=8", "run.seed=3"), max_staleness=2).lora
    assert received is not None
    assert (received.rank, received.alpha, received.targets[0], received.seed) == (8, 32.0, "q_proj", 3)


@pytest.mark.parametrize(
    ("changes", "probes"),
    [
        ((), True),
        (("rollout.strategy=partial",), False),
        (("nodes.expected=6", "nodes.train=1"), True),
        (("nodes.expected=6", "nodes.train=2"), False),
        (("nodes.expected=6", "nodes.train=2", "nodes.store=shared"), True),
    ],
)
def test_versions_are_probed_where_all_ranks_have_them(changes: tuple[str, ...], probes: bool) -> None:
    received = trainer_settings(config(*changes, "trainer.ranks=2"), max_staleness=4)
    assert (received.probe_tokens > 0) is probes


def test_every_shipped_config_can_be_simulated() -> None:
    for path in sorted(Path("launch/configs").glob("*.toml")):
        assert workload_of(load(path, environ={"DORA_TOKEN": "a token"})).settings().steps > 1


def test_the_trainer_gets_the_kind_of_advantage_of_each_source() -> None:
    def advantages(*changes: str) -> tuple[str, ...]:
        return trainer_settings(config(*changes), max_staleness=2).advantages

    assert advantages("task.sources.1.weight=2") == ()
    assert advantages("task.sources.1.advantage=rloo", "objective.advantage=dr_grpo") == ("dr_grpo", "rloo")
