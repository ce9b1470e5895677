import marimo

__generated_with = "0.25.2"
app = marimo.App()


@app.cell
def _():
    import marimo as mo

    return (mo,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    # Lesson 3: what staleness does to a policy gradient

    When several versions are served at once, a step trains answers that an older version wrote. This lesson takes the
    smallest policy there is, one that chooses among four answers, and looks at what its gradient does with old
    answers. The losses are those that DORA trains with.

    Version 0 was asked the same question eight times. Half of its answers were wrong:
    """)
    return


@app.cell
def _():
    import numpy as np
    import torch

    from dora.objectives.advantages import group_advantages

    names = ["wrong", "half", "good", "best"]
    rewards = np.array([0.0, 0.5, 0.8, 1.0])
    batch = torch.tensor([0, 0, 0, 0, 1, 1, 2, 3])
    group = rewards[batch]
    advantages = torch.from_numpy(group_advantages(group, np.tile(group, (8, 1)), kind="grpo"))
    version_0 = torch.tensor([4, 2, 1, 1], dtype=torch.float64).div(8).log()

    print(f"mean reward {group.mean():.2f}")
    for i, name in enumerate(names):
        print(f"{name:6} reward {rewards[i]:.1f}  advantage {advantages[batch == i][0]:+.2f}")
    return advantages, batch, names, rewards, torch, version_0


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The advantage says what is better than the mean of the group; what is better becomes likelier. "Half" is above the
    mean, because version 0 is bad. Now the policy trains for some steps, and these eight answers get old. How much
    likelier or rarer is each under the newer version? That is the *ratio*, π/μ:
    """)
    return


@app.cell
def _(advantages, batch, names, torch, version_0):
    from dora.objectives.objective import Objective
    from dora.objectives.settings import ObjectiveConfig
    from dora.objectives.tokens import Tokens

    def push(logits, **settings):
        """Return by how much an update makes each answer likelier, in logits."""
        weights = logits.clone().requires_grad_()
        one = torch.ones(8, dtype=torch.int64)
        tokens = Tokens(
            current_P=weights.log_softmax(0)[batch],
            behavior_P=version_0[batch],
            advantage_P=advantages,
            sequence_P=torch.arange(8),
            lengths_n=one,
            siblings_n=8 * one,
            staleness_n=one,
        )
        objective = Objective(ObjectiveConfig(**settings), longest=1)
        terms = objective(tokens)
        (terms.loss_P.sum() / objective.divisor({name: float(total) for name, total in terms.sums.items()})).backward()
        return -weights.grad

    corrected = {"loss": {"kind": "reinforce"}, "weight": "tis", "weight_high": 1e9}
    versions = [version_0]
    for _ in range(16):
        versions.append(versions[-1] + 2 * push(versions[-1], **corrected))

    print("age   ratio of" + "".join(f"{name:>8}" for name in names) + "   worth")
    for age in (0, 1, 2, 4, 8, 16):
        ratios = versions[age].softmax(0) / version_0.exp()
        weights = ratios[batch]
        worth = weights.sum() ** 2 / weights.square().sum()
        print(f"{age:3}           " + "".join(f"{ratio:8.2f}" for ratio in ratios) + f" {worth:6.1f} of 8")
    return push, versions


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    The last column is the *effective sample size*: how many of the eight old answers still tell us something about the
    new policy. That is the price of old data, and no formula gets it back. (A real policy moves much less in a step.
    These steps are huge, so that you can see what happens.)

    Now let a newer version train on the eight old answers. Does each become likelier (+) or rarer (-)? `true` is the
    exact gradient of the newer version's own mean reward. `none` ignores the age. `ratio` multiplies each term by its
    ratio. `tis` does too, but by 2 at most; it is DORA's default. `clip` is PPO's way: it ignores what has moved by
    more than about a quarter already. The largest push of each row is scaled to 1.
    """)
    return


@app.cell
def _(names, push, rewards, torch, versions):
    reinforce = {"kind": "reinforce"}
    methods = {
        "none": {"loss": reinforce, "weight": "none"},
        "ratio": {"loss": reinforce, "weight": "tis", "weight_high": 1e9},
        "tis": {"loss": reinforce, "weight": "tis"},
        "clip": {"loss": {"kind": "ppo", "ratio": "bypass", "clip_high": 0.28}},
    }
    for how_old in (0, 2, 8):
        policy, worths = versions[how_old].softmax(0), torch.from_numpy(rewards)
        true = policy * (worths - policy @ worths)
        print(f"age {how_old}, mean reward {policy @ worths:.2f}" + "".join(f"{name:>8}" for name in names))
        for method, pushes in {"true": true, **{m: push(versions[how_old], **s) for m, s in methods.items()}}.items():
            print(f"   {method:20}" + "".join(f"{one:+8.2f}" for one in pushes / pushes.abs().max()))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    At age 0 all agree. At age 2 look at "half". The newer version is better than that, so it should become rarer.
    `none` still pushes it up, because it was above the mean *then*. `clip` even pushes the good answers down: they
    have moved, so it ignores them, and what is left is "half". `ratio` and `tis` have all signs right.

    At age 8 even `tis` fails, since a ratio of 7 is cut to 2. Why cut at all, if `ratio` is right? It is right
    on average, and here exactly, because the batch has each answer just as often as version 0 gives it. In a real
    batch a single answer with a large ratio decides everything: eight are worth 1.2. Cutting trades a wrong
    direction, if ratios are large, for less noise. The way out is not to let them get large: that is what K bounds.

    So DORA trains with `tis` and a small K, and clips only what the step itself has changed since it began (`ratio =
    "decoupled"`). [OBJECTIVES.md](../OBJECTIVES.md#corrections) has the formulas, and [what asynchrony costs in
    learning](../explanation/cost-in-learning.md) has measurements.

    **Try it**: add `"icepop": {"loss": reinforce, "weight": "icepop"}` to the methods. Or give `tis` another
    `weight_high`: how large must it be to be right at age 8?
    """)
    return


if __name__ == "__main__":
    app.run()
