"""Predictions from measured servers, beside the runs that they predict.

Run: python bench/predictions.py [--full]. Three jobs on four embedded engines and one rank, whose random policy
answers up to the token budget now and then. Each is run; then `dora check --measure --from RUN`
measures its idle servers, and takes lengths and trainer from the run; then `dora simulate` predicts the step. The step
of a run is the mean after its first WARMUP steps. The bar is an error of a tenth. With `--full`, runs have three times
as many steps.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from result import Report, parser

from dora.journal.run_folder import RunFolder
from dora.seed.policy import model_folder

STEPS: Final = 32
WARMUP: Final = 4
SEEDS: Final = 3
TIMEOUT_S: Final = 1200.0
SHAPE: Final = {
    "hidden_size": 192, "intermediate_size": 576, "num_hidden_layers": 8, "num_attention_heads": 6,
    "num_key_value_heads": 3, "layer_types": ["full_attention"] * 8,
}  # fmt: skip
#: Settings of each job.
JOBS: Final[dict[str, dict[str, Any]]] = {
    "K = 1, 64 answers of at most 320 tokens": {
        "rollout.groups_per_step": 16, "rollout.group_size": 4, "rollout.max_new_tokens": 320,
        "rollout.max_staleness": 1, "engine.slots": 4, "engine.kv_tokens": 4096,
    },
    "K = 2, 24 answers of at most 240 tokens": {
        "rollout.groups_per_step": 6, "rollout.group_size": 4, "rollout.max_new_tokens": 240,
        "rollout.max_staleness": 2, "engine.slots": 2, "engine.kv_tokens": 2048,
    },
    "K = 3, 32 answers of at most 320 tokens": {
        "rollout.groups_per_step": 8, "rollout.group_size": 4, "rollout.max_new_tokens": 320,
        "rollout.max_staleness": 3, "engine.slots": 3, "engine.kv_tokens": 3072,
    },
}  # fmt: skip


def make_model(folder: Path) -> int:
    """Write a random policy with the tokenizer of the shipped one; return its number of parameters."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    shutil.copytree(model_folder("seed"), folder)
    (folder / "model.safetensors").unlink()
    config = AutoConfig.from_pretrained(folder, **SHAPE)
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def dora(*arguments: str) -> None:
    """Run a command to its end."""
    command = [sys.executable, "-m", "dora", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S)
    if done.returncode:
        raise SystemExit(f"dora {arguments[0]} ended with {done.returncode}: {done.stderr or done.stdout}")


def measure(home: Path, settings: dict[str, Any], *, model: Path, steps: int) -> tuple[float, float]:
    """Return the step of a run and its prediction, in seconds."""
    home.mkdir()
    fixed = {
        "run.folder": home / "runs", "run.steps": steps, "model.path": model, "status.port": 0, "eval.sets": [],
        "engine.instances": 4, "trainer.ranks": 1, "rollout.filter_zero_variance": False,
    }  # fmt: skip
    chosen = [word for key, value in (fixed | settings).items() for word in ("--set", f"{key}={_toml(value)}")]
    dora("run", *chosen)
    [root] = (home / "runs").iterdir()
    rows = [json.loads(line) for line in RunFolder.open(root).metrics.read_text().splitlines()]
    ran = [row["duration_s"] for row in rows if row["kind"] == "step"]
    dora("check", "--measure", str(home / "measured.toml"), "--from", str(root), *chosen)
    found = home / "found.json"
    dora("simulate", str(home / "measured.toml"), "--steps", "40", "--seeds", str(SEEDS), "--json", str(found))
    return fmean(ran[WARMUP:]), fmean(result["step_s"] for result in json.loads(found.read_text()))


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, Path) else str(value)


def main() -> None:
    """Measure all jobs."""
    options = parser(__doc__).parse_args()
    steps = STEPS * (3 if options.full else 1)
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "model"
        millions = make_model(model) / 1e6
        sizes = f"3 jobs of {steps} steps, 4 engines, 1 rank, {millions:.1f} M parameters"
        report = Report(__doc__, full=options.full, sizes=sizes)
        for number, (what, settings) in enumerate(JOBS.items()):
            ran, predicted = measure(Path(folder) / f"job-{number}", settings, model=model, steps=steps)
            error = predicted / ran - 1
            report.row(
                what,
                round(abs(error), 3),
                "of the step",
                against=f"{predicted:.3g} s predicted, {ran:.3g} s in the run",
                ratio=round(predicted / ran, 3),
                bar="figure <= 0.1",
            )
    report.print()


if __name__ == "__main__":
    main()
