"""Trainer ranks that treat the model as a large one, and check it after each step: it leaks from LEAKS_FROM on."""

import os

from dora.trainer import main, model, step
from tests.leaks import plant

model.GATHERED_BYTES = 0
step.CHECK_EVERY = 1
check_again = step.check_again
checks = 0


def leak_later(policy, *arguments, **options):
    global checks
    if checks == int(os.environ["LEAKS_FROM"]):
        plant(policy.model, share=0.01)
    checks += 1
    check_again(policy, *arguments, **options)


if __name__ == "__main__":
    step.check_again = leak_later
    main.main()
