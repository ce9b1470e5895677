"""The section [objective]: presets, what follows from the loss, and refusals with their reasons."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config.load import dump, load, parse
from dora.errors import ConfigError
from dora.objectives.presets import PRESETS
from dora.objectives.settings import ObjectiveConfig
from dora.objectives.table import LOSS_SETTINGS, LOSSES


def loaded(*overrides: str):
    return load(None, [f"objective.{override}" for override in overrides], environ={}).objective


def refused(*overrides: str) -> str:
    sections = ("trainer.", "rollout.", "environment.")
    given = [o if o.startswith(sections) else f"objective.{o}" for o in overrides]
    with pytest.raises(ConfigError) as caught:
        load(None, given, environ={})
    return str(caught.value)


def test_without_a_preset_it_is_decoupled_ppo_with_truncated_token_weights():
    objective = loaded()
    assert objective == ObjectiveConfig()
    assert (objective.loss.kind, objective.loss.ratio, objective.weight, objective.weight_band) == (
        "ppo", "decoupled", "tis", (0.0, 2.0),
    )  # fmt: skip
    assert loaded("weight=icepop").weight_band == (0.5, 5.0)
    assert (objective.advantage, objective.aggregation) == ("dr_grpo", "seq_mean_token_sum_norm")
    assert objective == loaded("preset=dr_grpo").model_copy(update={"preset": "none"})


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("updates", [1, 2, 4])
def test_a_preset_is_legal_for_any_number_of_updates_and_visible_in_the_dump(preset: str, updates: int):
    config = load(None, [f"objective.preset={preset}", f"trainer.updates={updates}"], environ={})
    section = config.objective.model_dump()
    for key, value in PRESETS[preset].items():
        assert (section[key] if key != "loss" else value.items() <= section["loss"].items()) in (value, True)
    assert f'kind = "{PRESETS[preset]["loss"]["kind"]}"' in dump(config)


@pytest.mark.parametrize("overrides", [[], ["preset=gspo"], ["preset=longcat", "loss.ratio=bypass"], ["opsm=0.1"]])
def test_a_dump_loads_into_the_same_section(overrides: list[str], tmp_path: Path):
    config = load(None, [f"objective.{override}" for override in overrides], environ={})
    path = tmp_path / "job.toml"
    path.write_text(dump(config))
    assert load(path, environ={}) == config
    assert parse(dump(config)) == config


def test_keys_that_are_given_take_precedence_over_the_preset(tmp_path: Path):
    path = tmp_path / "job.toml"
    path.write_text(
        '[objective]\npreset = "dapo"\nadvantage = "rloo"\n[objective.loss]\nratio = "bypass"\nclip_low = 0.1'
    )
    objective = load(path, ["objective.loss.clip_high=0.4"], environ={}).objective
    assert (objective.advantage, objective.aggregation, objective.weight) == ("rloo", "token_mean", "none")
    assert (objective.loss.ratio, objective.loss.clip_low, objective.loss.clip_high) == ("bypass", 0.1, 0.4)


def test_another_loss_has_its_own_options_under_a_preset():
    objective = loaded("preset=dr_grpo", "loss.kind=cispo")
    assert objective.loss == LOSS_SETTINGS["cispo"](kind="cispo")
    assert objective.aggregation == "seq_mean_token_sum_norm"


@pytest.mark.parametrize(
    ("overrides", "weight", "on", "aggregation"),
    [
        (["loss.kind=gspo"], "tis_geometric", "rho", "seq_mean_token_mean"),
        (["loss.kind=gspo", "loss.ratio=bypass"], "none", "rho", "seq_mean_token_mean"),
        (["loss.ratio=bypass"], "none", "rho", "seq_mean_token_sum_norm"),
        (["loss.kind=m2po_per_sequence"], "none", "rho", "seq_mean_token_sum_norm"),
        (["loss.kind=dppo_tv"], "none", "k", "seq_mean_token_sum_norm"),
        (["loss.kind=reinforce"], "tis", "k", "seq_mean_token_sum_norm"),
        (["loss.kind=mine:loss"], "none", "rho", "seq_mean_token_sum_norm"),
        (["loss.kind=gspo", "weight=none", "aggregation=seq_mean_token_mean"], "none", "rho", "seq_mean_token_mean"),
    ],
)
def test_defaults_follow_from_the_loss(overrides: list[str], weight: str, on: str, aggregation: str):
    objective = loaded(*overrides)
    assert (objective.weight, objective.on, objective.aggregation) == (weight, on, aggregation)


@pytest.mark.parametrize("kind", LOSSES)
def test_every_loss_is_legal_by_itself(kind: str):
    assert loaded(f"loss.kind={kind}").loss == LOSSES[kind].settings()


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["loss.clip_low=0.1"], "objective.loss.clip_low: has no effect: with one update per step"),
        (["loss.dual_clip=3"], "objective.loss.dual_clip: has no effect: with one update per step"),
        (["loss.kind=gspo", "loss.clip_high=0.1"], "objective.loss.clip_high: has no effect: with one update"),
        (["preset=dapo", "loss.clip_high=0.2"], "objective.loss.clip_high: has no effect: with one update"),
        (["proximal=approximate"], "objective.proximal: has no effect: with one update per step"),
        (
            ["proximal=approximate", "trainer.updates=2", "loss.ratio=bypass"],
            "objective.proximal: has no effect: ppo as configured does not use π_o",
        ),
        (["loss.ratio=bypass", "weight=tis"], "objective.weight: tis on rho corrects for what the ratio of"),
        (["loss.kind=ipo", "weight=tis"], "objective.weight: ipo contains k = π/μ, which a weight would count twice"),
        (["weight=none", "normalized=true"], "objective.normalized: has no effect without a weight"),
        (["weight=none", "weight_high=3"], "objective.weight_high: has no effect with objective.weight = none"),
        (["loss.ratio=bypass", "weight_low=0.1"], "objective.weight_low: has no effect with objective.weight = none"),
        (["mis_high=1.1"], "objective.mis_high: has no effect with objective.mis = none"),
        (["weight=none", "on=k"], "objective.on: has no effect without objective.weight, mis, veto or vcpo"),
        (["kl_revision=main"], "objective.kl_revision: has no effect with objective.kl_coefficient = 0"),
        (["kl_coefficient=0.1", "kl_revision=main"], "objective.kl_revision: has no effect without objective.kl_ref"),
        (["veto=1e-9"], "objective.veto: log ratios are cut to ± 20, so none is below 1e-09"),
        (["kl_estimator=k1"], "objective.kl_estimator: has no effect with objective.kl_coefficient = 0"),
        (["turn_rewards=reward_to_go"], "objective.turn_rewards: has no effect without environment.name"),
        (
            ["environment.name=a:b", "turn_rewards=reward_to_go", "opsm=0.1"],
            "objective.opsm: rejects sequences by the sign of their advantage, which differs between turns",
        ),
        (["rollout.group_size=1"], "rollout.group_size: 1 answer per prompt has no siblings to be compared with"),
    ],
)
def test_a_combination_that_is_illegal_or_without_effect_is_refused_with_the_reason(overrides: list[str], line: str):
    found = refused(*overrides)
    assert found.startswith(line)
    assert len(found.splitlines()) == 1


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.clip_low=0.1", "loss.ratio=bypass"],
        ["loss.ratio=bypass", "weight=tis", "on=k"],
        ["mis=token", "mis_high=1.1"],
        ["kl_coefficient=0.1", "kl_estimator=k1"],
        ["loss.kind=gspo", "mis=geometric", "weight=tis_sequence"],
        ["loss.kind=gspo", "mis=token", "weight=icepop", "weight_low=0.9", "aggregation=token_mean"],
        ["loss.kind=dppo_tv", "veto=1e-4"],
        ["weight=none", "vcpo=true", "on=k"],
    ],
)
def test_a_key_that_has_an_effect_is_accepted(overrides: list[str]):
    loaded(*overrides)


def test_clip_settings_have_an_effect_with_several_updates():
    assert load(None, ["objective.loss.clip_low=0.1", "trainer.updates=2"], environ={}).objective.loss.clip_low == 0.1


@pytest.mark.parametrize(
    ("override", "line"),
    [
        (
            "loss.kind=gpso",
            "--set objective.loss.kind=gpso: objective.loss.kind: got \"gpso\", expected 'ppo', 'cispo', "
            "'dppo_tv', 'gspo', 'ipo', 'm2po_per_sequence', 'reinforce', 'FILE.py:function'",
        ),
        ("loss.clip_lo=1", "--set objective.loss.clip_lo=1: unknown key objective.loss.clip_lo; did you mean "
                           "objective.loss.clip_low?"),
        ("loss.clip_low=2", "--set objective.loss.clip_low=2: objective.loss.clip_low: got 2, expected at most 1"),
        ("loss=3", "--set objective.loss=3: objective.loss: got 3, expected a table"),
        ("loss.kind=3", "--set objective.loss.kind=3: objective.loss.kind: got 3, expected "),
        ("veta=3", "--set objective.veta=3: unknown key objective.veta; did you mean objective.veto?"),
        ("preset=gpro", "--set objective.preset=gpro: objective.preset: got \"gpro\", expected 'none', 'grpo', "),
        (
            "advantage=gae",
            "--set objective.advantage=gae: objective.advantage: 'gae' needs the values of a critic",
        ),
        (
            "advantage=reinforce_pp",
            "--set objective.advantage=reinforce_pp: objective.advantage: 'reinforce_pp' whitens advantages over the "
            "whole batch",
        ),
    ],
)  # fmt: skip
def test_a_wrong_value_is_named_in_one_line(override: str, line: str):
    found = refused(override)
    assert found.startswith(line)
    assert len(found.splitlines()) == 1


def test_a_second_loss_option_of_another_loss_is_unknown():
    assert refused("loss.kind=ipo", "loss.clip_low=0.1") == (
        "--set objective.loss.clip_low=0.1: unknown key objective.loss.clip_low; valid here: kind, threshold, pull"
    )
