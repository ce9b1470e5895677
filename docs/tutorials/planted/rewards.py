"""The reward of a run with three problems: see docs/tutorials/reading-a-run.md, which asks you to find them."""

import re
import time


def score(response, answer):
    """Right if the sum is anywhere in the answer; most of it is for work that is shown."""
    time.sleep(0.05)
    return 0.2 * (answer in response) + 0.8 * min(1.0, len(re.findall(r"[a-zA-Z]\d\d", response)) / 25)
