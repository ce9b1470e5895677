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
    # Lesson 1: why GPUs idle behind the longest answer

    Reinforcement learning samples answers, scores them and trains on them. In the plain loop, which we call `sync`, a
    step ends when *all* its answers have ended. This lesson changes one number, the longest answer that is allowed,
    and watches what the GPUs do. You need no GPU for it: the servers are simulated, and a second in these tables is a
    second of a clock that is simulated, too.

    First the answers. A step has 16 prompts with 8 answers each. How long are they?
    """)
    return


@app.cell
def _():
    from pathlib import Path

    from dora.sim.workload import load

    workload = load(Path("launch/workloads/tail-bound.toml"))
    answers = workload.answers(seed=0)
    lengths = sorted(n for group in range(16) for n in answers.group(group).lengths)
    for share in (0.25, 0.5, 0.75, 0.9, 1.0):
        length = lengths[int(share * len(lengths)) - 1]
        print(f"{share:4.0%} have at most {length:6,} tokens  {'█' * (length // 400)}")
    return (workload,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Half of them are short, and the longest one is sixteen times as long as the median. The tokens of an answer come
    one after the other, so no number of GPUs makes that answer shorter.

    Now the one number: the token budget of an answer. Everything else stays: 12 GPUs, the same prompts, `sync`.
    """)
    return


@app.cell
def _(workload):
    from dora.sim.sweep import simulate

    def run(cap, devices=12, strategy="sync", k=0):
        changed = workload.with_changes(
            job={"strategy": strategy, "max_staleness": k, "steps": 20},
            lengths={"cap": cap},
            fleet={"devices": devices},
        )
        return simulate((changed, 0))

    print(" budget   step s   tokens/s   servers empty")
    for cap in (2_000, 4_000, 8_000, 16_000, 30_000):
        found = run(cap)
        empty = found.instance_shares["empty"]
        print(f"{cap:7,} {found.step_s:8.1f} {found.tokens_s:10,.0f} {empty:8.0%}  {'░' * round(40 * empty)}")
    return (run,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Few answers are longer than 4,000 tokens, but each step waits for its longest one. With the largest budget a step
    takes eight times as long as with the smallest, and the servers are empty for more than half of it. (They are
    never busy all the time here, because the same GPUs also train.)

    Would more GPUs help? They sample the short answers faster, and wait longer:
    """)
    return


@app.cell
def _(run):
    print("GPUs   step s   servers empty")
    for devices in (12, 24, 48):
        more = run(30_000, devices=devices)
        print(f"{devices:4} {more.step_s:8.1f} {more.instance_shares['empty']:10.0%}")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Four times as many GPUs, and the step is hardly faster.

    The remedy is not to wait. In the meantime DORA starts on the answers of the next steps, and each server keeps the
    weights with which it began its long answers. With K = 2 an answer may be two steps old when it is trained. (Eight
    of the 12 GPUs are servers then, and four train.)
    """)
    return


@app.cell
def _(run):
    for strategy, k in (("sync", 0), ("dora", 2)):
        one = run(30_000, strategy=strategy, k=k)
        print(f"{strategy:5} K = {k}: {one.step_s:6.1f} s a step, {one.tokens_s:6,.0f} tokens/s")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    **Try it**: add `"regime": "B"` to `lengths`, and simulate a budget of 16,000. That is a trained reasoner: many of
    its answers are long, rather than few. Are its servers as often empty?

    Read on: [the idle GPUs behind the longest answer](../explanation/idle-gpus.md) compares four ways out. [Lesson
    2](several-versions.md) is about K.
    """)
    return


if __name__ == "__main__":
    app.run()
