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
    # Lesson 2: several versions at once

    Training makes a new version of the policy at each step. DORA serves several of them side by side: a server with a
    long answer keeps the version that began it, while others already have the next one. K is how many steps old an
    answer may be when it is trained, so at most K + 1 versions are needed at a time.

    What does K buy? The same small job as in [lesson 1](longest-answer.md), on eight servers and four GPUs that
    train:
    """)
    return


@app.cell
def _():
    import dora

    job = "launch/workloads/tail-bound.toml"

    def show(rows):
        print("  K   servers   step s   mean age   trainer idle")
        for row in rows:
            print(
                f"{row['max_staleness']:3} {row['instances']:9} {row['step_s']:8.1f} {row['staleness_mean']:10.2f} "
                f"{row['trainer_idle']:13.0%}"
            )

    show(dora.simulate(job, k=[0, 1, 2, 3, 5, 7], steps=24))
    return dora, job, show


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Going from 0 to 1 buys the most, and each further step buys less. There is a rule behind it. Call L the time
    of the longest answer, from its first token to the version that has learned from it. With K = 0 every step
    contains one such L. With K, an answer may take K + 1 steps, so K + 1 steps share one L: **no step can be faster
    than L / (K + 1)**.

    And K has a price, in the column *mean age*: with a larger K the policy learns from older answers. [Lesson
    3](staleness.md) shows what that does.

    A step cannot be faster than its training either. So change one number: a trainer that is eight times as slow.
    """)
    return


@app.cell
def _(dora, job, show):
    show(dora.simulate(job, k=[0, 1, 2, 3], steps=24, train__tokens_s_per_device=500.0))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Now K = 1 keeps the trainer busy nearly all the time, and a larger K buys little. So the first question about a
    job is not "which K?" but "what does the trainer wait for?" If it is hardly idle, look at the *split* instead: how
    many of the GPUs sample, and how many train.

    Still with the slow trainer, K = 1, and 12 GPUs in all:
    """)
    return


@app.cell
def _(dora, job, show):
    show(dora.simulate(job, k=[1], split=[3, 4, 6, 8, 10], steps=24, train__tokens_s_per_device=500.0))
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    With few servers the trainer waits; with many servers there are few GPUs left to train. The best split is in
    between. With it, K = 1 is as fast as K = 3 was with eight servers, and no answer is older than one step.

    **Try it**: put the path of your own configuration in the place of `job`. `dora plan` searches
    the split for you. [Choose K and a split](../how-to/choose-k-and-split.md) goes through it.
    """)
    return


if __name__ == "__main__":
    app.run()
