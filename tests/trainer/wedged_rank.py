"""Trainer ranks, of which the last one never ends its first pass."""

import os
import threading

from dora.trainer import main, pulse, step

compute = step.logprobs


def wedged_logprobs(*arguments, **options):
    if int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1:
        threading.Event().wait()
    return compute(*arguments, **options)


if __name__ == "__main__":
    step.logprobs = wedged_logprobs
    pulse.FLIGHT_S = 3.0
    main.main()
