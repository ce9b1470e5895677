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
    # Lesson 4: a reward, and how it is gamed

    A reward in DORA is a Python function of the response and the expected answer. Here is one for sums. It looks
    reasonable: the answer should be in the response.
    """)
    return


@app.cell
def _():
    def contains(response, answer):
        return float(answer in response)

    print(contains("17 + 5 is 22", "22"), contains("17 + 5 is 12", "22"))
    return (contains,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Now a policy that learns from it. It is no language model, only a choice among four ways to respond, which is
    enough to see what a reward asks for. At first it mostly guesses. One time in twenty it lists every possible
    number:
    """)
    return


@app.cell
def _():
    import numpy as np

    WAYS = {
        "guesses": lambda a, b, rng: f"{a} + {b} is {a + b + rng.integers(1, 5)}",
        "calculates": lambda a, b, rng: f"{a} + {b} is {a + b + (rng.random() < 0.4)}",  # wrong in 4 of 10
        "refuses": lambda a, b, rng: "I do not know.",
        "lists": lambda a, b, rng: "One of " + ", ".join(map(str, range(41))),
    }
    BEGINNING = np.log([0.70, 0.20, 0.05, 0.05])

    def answer_groups(policy, rng, *, groups=8, siblings=8):
        """Ask for sums; return the chosen ways, the responses and the right answers, a row for each group."""
        terms = rng.integers(1, 20, size=(groups, 2))
        chosen = rng.choice(len(WAYS), p=policy, size=(groups, siblings))
        ways = list(WAYS.values())
        responses = [[ways[way](a, b, rng) for way in row] for (a, b), row in zip(terms, chosen, strict=True)]
        return chosen, responses, [str(a + b) for a, b in terms]

    return BEGINNING, WAYS, answer_groups, np


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    What teaches is not the reward itself but the *advantage*: by how much an answer is better than the others to the
    same prompt. Two groups, with the function that DORA uses:
    """)
    return


@app.cell
def _(np):
    from dora.core.on_requests import advantage_free
    from dora.objectives.advantages import group_advantages

    def advantages_of(rewards):
        return group_advantages(rewards.ravel(), np.repeat(rewards, rewards.shape[1], axis=0), kind="grpo")

    for group in ([1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0], [1, 1, 1, 1]):
        verdict = advantage_free(tuple(map(float, group)), filter_zero_variance=True)
        print(group, advantages_of(np.array([group], dtype=float)).round(2), verdict[1].value if verdict else "")
    return advantage_free, advantages_of


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    One success among failures counts for a lot; one among successes, for little. If all rewards of a group are equal,
    every advantage is 0. Such a group teaches nothing, and DORA filters it out (*zero variance*) and tries another
    prompt instead.

    Now train. *score* is what we really want: that the last number of the response is right.
    """)
    return


@app.cell
def _(BEGINNING, WAYS, advantage_free, advantages_of, answer_groups, np):
    def last_number(response, answer):
        return float(response.rstrip(".").split()[-1] == answer)

    def train(reward, *, steps=60, rate=1.0, seed=1):
        rng, logits = np.random.default_rng(seed), BEGINNING.copy()
        print("step  reward  score  filtered   " + "".join(f"{way:>12}" for way in WAYS))
        for step in range(steps + 1):
            policy = np.exp(logits) / np.exp(logits).sum()
            chosen, responses, answers = answer_groups(policy, rng)
            graded = list(zip(responses, answers, strict=True))
            rewards = np.array([[reward(response, answer) for response in row] for row, answer in graded])
            score = np.mean([[last_number(response, answer) for response in row] for row, answer in graded])
            kept = [advantage_free(tuple(row), filter_zero_variance=True) is None for row in rewards]
            if step % 10 == 0:
                shares = "".join(f"{share:12.0%}" for share in policy)
                print(f"{step:4} {rewards.mean():7.2f} {score:6.2f} {8 - sum(kept):4} of 8   {shares}")
            if any(kept):
                took = np.eye(len(WAYS))[chosen[kept].ravel()]
                logits += rate * (advantages_of(rewards[kept])[:, None] * (took - policy)).mean(axis=0)

    return last_number, train


@app.cell
def _(contains, train):
    train(contains)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    At step 10 all is well: the policy has learned to calculate, and the score has nearly tripled. Then the reward
    goes on to 1, and the score falls to 0. A response with all numbers contains the right one, so it always earns the
    reward, while a calculation is sometimes wrong. Nobody told the policy to cheat: it does what the function rewards.
    And look at *filtered*: at the end every answer of a group succeeds, and nothing more is learned.

    Change one thing, the reward. Pay for the result alone:
    """)
    return


@app.cell
def _(last_number, train):
    train(last_number)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    **Try it**: make the reward `0.9 * last_number(...) + 0.1 * contains(...)`. Is a tenth of a bad reward harmless?
    And how rare must "lists" be in `BEGINNING` for the policy never to find it?

    Three habits help with real models: score held-out prompts by the rule that you really mean, read answers, and
    watch the share of filtered groups. [Reading a run](../tutorials/reading-a-run.md) finds a gamed reward in a run;
    [your own task and reward](../tutorials/own-task.md) makes one.
    """)
    return


if __name__ == "__main__":
    app.run()
