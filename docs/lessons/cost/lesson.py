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
    # Lesson 6: what a step costs, and where the bend is

    More GPUs make a step faster, up to a point. Since you pay for all of them, also while they wait, there is a width
    at which the price of a trained token begins to rise. This lesson changes one number, the GPUs of a job, and looks
    for it.

    For each width the simulator tries a few splits into servers and trainer, and keeps the fastest. The job is a
    small one with moderately long answers and K = 2. A GPU costs 2 dollars an hour; put in your own price.
    """)
    return


@app.cell
def _():
    from dora.sim.sweep import simulate
    from dora.sim.workload import Workload

    PRICE = 2.0  # dollars for an hour of a GPU

    def fastest(gpus, k):
        splits = {gpus * eighths // 8 for eighths in (3, 4, 5, 6)}
        job = Workload().with_changes(job={"max_staleness": k, "steps": 12})
        tried = [job.with_changes(fleet={"devices": gpus, "rollout_devices": n}) for n in splits if n > k]
        return min((simulate((one, 0)) for one in tried), key=lambda result: result.step_s)

    def show(gpus, k):
        found = fastest(gpus, k)
        price = PRICE / 3600 * found.devices / found.tokens_s * 1e6
        print(
            f"{k:3} {gpus:5} {found.instances:8} {found.step_s:8.1f} {price:18.3f} {found.limit.rule:>12}   "
            + "█" * round(60 * price)
        )

    HEADING = "  K  GPUs  servers   step s   $ per 1M tokens   limited by"
    print(HEADING)
    for gpus in (4, 8, 16, 32, 48):
        show(gpus, 2)
    return HEADING, show


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Four GPUs are expensive, because K = 2 needs three servers, which leaves one GPU to train, and the servers wait for
    it. Eight are the cheapest. Beyond that, each additional GPU buys speed at a rising price, and beyond 32 hardly any:
    half as many again make a step only a tenth faster. That is the bend.

    The last column says why. *train* and *decode* are work, which more GPUs share. *slowest* is the longest answer,
    which cannot be shared ([lesson 1](longest-answer.md)). Where it becomes the limit, money stops helping.

    But K helps there: K + 1 steps share the longest answer ([lesson 2](several-versions.md)). So change the other
    number, at 32 GPUs:
    """)
    return


@app.cell
def _(HEADING, show):
    print(HEADING)
    for k in (0, 1, 2, 4):
        show(32, k)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    K moves the bend. The same 32 GPUs train a token for less with a larger K, though the tokens are older, and may
    teach a little less ([lesson 3](staleness.md)). The cheapest run is the one that reaches *your score* for the
    least money, and only runs of your own can say which that is.

    **Try it**: `Workload().with_changes(lengths={"scale": 3.0})` makes all answers three times as long. Where is the
    bend now? [Estimate what a run costs](../how-to/cost.md) does this for a configuration.
    """)
    return


if __name__ == "__main__":
    app.run()
