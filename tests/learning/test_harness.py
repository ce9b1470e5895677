"""The lag harness: without staleness it is plain synchronous training, and it repeats itself bit for bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from learning import cells, harness
from transformers import AutoModelForCausalLM

from dora.config.load import load
from dora.config.schema import Config
from dora.learning.learner import OneRank
from dora.seed.policy import model_folder

TINY = (
    "run.steps=3", "rollout.groups_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=24",
    "eval.sets.0.prompts=8", "eval.every=1", "task.sources.0.options.min_terms=3", "task.sources.0.options.max_terms=6",
)  # fmt: skip


@pytest.fixture(autouse=True)
def process() -> Iterator[None]:
    with OneRank():
        yield


def config(*overrides: str) -> Config:
    return load(cells.TASKS["sums"], [*TINY, *overrides], environ={})


class PlainTrainer:
    """A synchronous trainer written for this test: one sequence at a time, transformers' attention, torch's AdamW."""

    def __init__(self, settings: Config) -> None:
        folder = model_folder(settings.model.path)
        self.settings = settings
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        trainer = settings.trainer
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), betas=trainer.betas, weight_decay=trainer.weight_decay
        )

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return {name: parameter.detach() for name, parameter in self.model.named_parameters()}

    def step(self, step: int, groups: list[harness.Group]) -> None:
        total = self.settings.rollout.max_new_tokens * sum(len(group.answers) for group in groups)
        for group in groups:
            rewards = torch.tensor(group.rewards)
            for answer, advantage in zip(group.answers, rewards - rewards.mean(), strict=True):
                prompt = len(answer.prompt.tokens)
                tokens = torch.tensor([*answer.prompt.tokens, *answer.tokens])
                logprobs = self.model(input_ids=tokens[None]).logits[0].log_softmax(-1)
                current = logprobs[range(prompt - 1, len(tokens) - 1), tokens[prompt:]]
                rho = (current.detach() - torch.tensor(answer.logprobs)).exp().clamp(max=2.0)
                (-(rho * advantage * current).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.settings.trainer.max_grad_norm)
        warm = min(1.0, (step + 1) / self.settings.trainer.warmup_steps)
        self.optimizer.param_groups[0]["lr"] = self.settings.trainer.learning_rate * warm
        self.optimizer.step()
        self.optimizer.zero_grad()


def test_without_staleness_every_step_is_that_of_a_plain_synchronous_trainer() -> None:
    settings = config()
    rollout, plain = harness.Rollout(settings), PlainTrainer(settings)
    learner = harness.Learner(settings, model=rollout.inputs.model, max_staleness=0)
    position = 0
    try:
        for step in range(settings.run.steps):
            rollout.load(learner.versions[step])
            groups, following = harness.sample(rollout, settings, position=position, version=step)
            rollout.load(plain.weights)
            again, _ = harness.sample(rollout, settings, position=position, version=step)
            position = following
            assert [a.tokens for g in groups for a in g.answers] == [a.tokens for g in again for a in g.answers]
            learner.step(step, groups)
            plain.step(step, again)
            published = learner.versions[step + 1]
            for name, weights in plain.weights.items():
                torch.testing.assert_close(published[name], weights, atol=2e-5, rtol=0, msg=lambda m, n=name: n + m)
    finally:
        rollout.close()


def test_an_adapter_is_trained_in_place_of_the_weights() -> None:
    settings = config("trainer.lora.rank=2", "trainer.lora.targets=['q_proj']")
    rollout = harness.Rollout(settings)
    try:
        learner = harness.Learner(settings, model=rollout.inputs.model, max_staleness=0)
        before = learner.versions[0]
        rollout.load(before)
        learner.step(0, harness.sample(rollout, settings, position=0, version=0)[0])
    finally:
        rollout.close()
    changed = [name for name, tensor in learner.versions[1].items() if not torch.equal(tensor, before[name])]
    assert changed == [name for name in before if name.endswith("q_proj.weight")]


def test_a_run_repeats_itself_bit_for_bit_and_another_seed_does_not() -> None:
    first, second = (harness.run(config(), staleness=2, eval_every=1) for _ in range(2))
    kept = [[step[name] for name in cells.METRICS] for step in first.steps]
    assert first.heldout == second.heldout
    assert kept == [[step[name] for name in cells.METRICS] for step in second.steps]
    other = harness.run(config("run.seed=1"), staleness=2, eval_every=1)
    assert kept != [[step[name] for name in cells.METRICS] for step in other.steps]


def test_staleness_is_the_number_of_steps_up_to_k() -> None:
    steps = harness.run(config("run.steps=4"), staleness=2, eval_every=4).steps
    lags = [[key for key in step if key.startswith("lag=") and key.endswith("/tokens")] for step in steps]
    assert lags == [["lag=0/tokens"], ["lag=1/tokens"], ["lag=2/tokens"], ["lag=2/tokens"]]


def test_several_updates_train_all_groups_of_a_step() -> None:
    whole, split = (harness.run(config(f"trainer.updates={m}"), staleness=0, eval_every=3) for m in (1, 4))
    assert whole.steps[0]["step_tokens"] == split.steps[0]["step_tokens"]
    assert whole.steps[1]["all/log_ratio_abs_max"] < 1e-3 < split.steps[0]["all/log_ratio_abs_max"]


def test_the_area_is_the_mean_height_of_the_curve() -> None:
    assert harness.Curve([(0, 0.2), (4, 0.6), (6, 1.0)], []).area == pytest.approx((4 * 0.4 + 2 * 0.8) / 6)


def test_a_policy_that_samples_nothing_to_learn_from_keeps_its_score() -> None:
    curve = harness.run(config("rollout.max_new_tokens=1"), staleness=0, eval_every=1)
    assert curve.heldout == [(0, 0.0), (3, 0.0)]
    assert curve.steps == []
