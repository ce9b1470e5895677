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
    # Lesson 5: check a run with ten lines of your own

    DORA promises three things about the answers that it trains. **C1**: all tokens of an answer come from one
    version. **C2**: no group of answers is lost; each is trained, or left out for a reason that is written down.
    **C3**: none is older than K steps when it is trained.

    You need not believe it. Each fact and each decision of a run is in its journal, and the journal is easy to read.
    The run in this lesson is simulated, but its decisions are made by the code that decides in a live run. To read a
    run of your own, leave out this cell, and set `path` to the `journal.msgpack` in its folder.
    """)
    return


@app.cell
def _():
    import tempfile
    from pathlib import Path

    from dora.journal.codec import FORMAT, Epoch, Header
    from dora.journal.writer import JournalWriter
    from dora.sim.workload import Workload
    from dora.sim.world import World

    job = {"max_staleness": 2, "steps": 12, "groups_per_step": 8, "group_size": 4, "filter_zero_variance": True}
    workload = Workload().with_changes(job=job, faults={"instance_hours": 0.05, "push_failure_share": 0.1})
    path = Path(tempfile.mkdtemp(), "journal.msgpack")
    with JournalWriter(path) as writer:
        writer.append(Header(FORMAT, "lesson", "2026-01-01T00:00:00Z", "0.1.0", workload.settings()))
        writer.append(Epoch(0, 0.0, ""))
        World(workload, seed=3, sink=writer.handled).run()
    return (path,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    A journal is a list of events, each with the commands by which the controller answered it. Here is the first
    answer of the run, from its prompt to its training:
    """)
    return


@app.cell
def _(path):
    from dora.core.commands import AdmitGroup, CommitGroup, DropGroup, Generate
    from dora.journal.reader import Journal

    journal = Journal(path)
    settings = journal.header.settings
    entries = list(journal)
    print(f"K = {settings.rules.max_staleness}, {len(entries):,} events")
    group = next(order.group for _, orders in entries for order in orders if isinstance(order, CommitGroup))
    for event, orders in entries:
        for item in (event, *orders):
            of_first_answer = getattr(item, "trajectory", None) == group * settings.group_size
            if of_first_answer or getattr(item, "group", None) == group:
                print(f"{event.at:6.2f} s  {str(item).replace(f'at={event.at}, ', '')}")
    return AdmitGroup, CommitGroup, DropGroup, Generate, entries, settings


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    `AdmitGroup` gives the group its *tag*, the version that will write all its answers. `GenerationFinished` says
    which version did write the tokens (each of `spans` is a version, the first token, and the end). `CommitGroup`
    sends the group to a training step. More is not needed for the three checks:
    """)
    return


@app.cell
def _(AdmitGroup, CommitGroup, DropGroup, Generate, entries, settings):
    def check(entries, k):
        orders = [order for _, orders in entries for order in orders]
        tags = {order.group: order.version for order in orders if isinstance(order, AdmitGroup)}
        steps = {order.group: order.step for order in orders if isinstance(order, CommitGroup)}
        left_out = {order.group: order.reason for order in orders if isinstance(order, DropGroup)}
        wrote = [(order.trajectory, order.version) for order in orders if isinstance(order, Generate)]
        wrote += [(event.trajectory, v) for event, _ in entries for v, _, _ in getattr(event, "spans", ())]
        mixed = {t for t, version in wrote if version != tags.get(t // settings.group_size, version)}
        lost = [group for group in tags if (group in steps) + (group in left_out) != 1]
        old = [group for group, step in steps.items() if step - tags[group] > k]
        print(f"{len(tags)} groups, {len(steps)} trained, {len(left_out)} left out: {sorted(set(left_out.values()))}")
        print(f"   C1: {len(mixed)} answers mixed, C2: {len(lost)} groups lost, C3: {len(old)} older than {k}")

    check(entries, settings.rules.max_staleness)
    return (check,)


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    Two servers of this run failed, and so did three pushes of weights; still nothing is mixed, lost or too old. (The
    groups that were left out had four equal rewards; [lesson 4](rewards.md) says why they teach nothing.)

    But a check that never finds anything proves nothing. So change one number and see it fail: ask for K = 1 of a run
    with K = 2. Then alter the journal: say that a token came from another version, and leave out one decision to
    train.
    """)
    return


@app.cell
def _(CommitGroup, check, entries):
    from msgspec.structs import replace

    from dora.core.events import GenerationFinished

    check(entries, 1)

    place, finished = next((i, e) for i, (e, _) in enumerate(entries) if isinstance(e, GenerationFinished))
    foreign = replace(finished, spans=((0, 0, 1), (1, 1, finished.num_tokens)))
    check([*entries[:place], (foreign, entries[place][1]), *entries[place + 1 :]], 2)

    place = next(i for i, (_, orders) in enumerate(entries) if any(isinstance(o, CommitGroup) for o in orders))
    event_there, orders_there = entries[place]
    kept = [order for order in orders_there if not isinstance(order, CommitGroup)]
    check([*entries[:place], (event_there, kept), *entries[place + 1 :]], 2)
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    One thing is left. Could the journal itself be made up? Its decisions cannot be: they follow from the events, so
    anybody can compute them again and compare.
    """)
    return


@app.cell
def _(entries, settings):
    from dora.journal.replay import replay

    replayed = replay(settings, entries)
    print(f"{replayed.num_events:,} events decided again; difference: {replayed.difference}")
    return


@app.cell(hide_code=True)
def _(mo):
    mo.md(r"""
    `dora audit RUN` does all this, and compares the events with the tokens and log-probs that were stored. Every run
    is audited at its end.

    **Try it** with a run of your own, as in [your first run](../tutorials/first-run.md). Read on: [the three
    constraints](../explanation/three-constraints.md).
    """)
    return


if __name__ == "__main__":
    app.run()
