"""A trainer rank that treats the tiny model as a large one: it gathers layer by layer and reduces every gradient."""

from dora.trainer import main, model

model.GATHERED_BYTES = 0
main.main()
