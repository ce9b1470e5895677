"""The policies that the trained policy is compared with: the proximal and the reference policy, in the same process.

All three see the same rows of the same micro-batches, one after the other (periodic asynchrony, arXiv 2511.18871), so
that no pass waits for a whole batch. Their layout over the ranks, kernels and temperature are the same: with equal
weights, log-probs are equal to the bit.
Invariant: a copy has no gradients and no optimizer state, and its weights only change in `refresh`.
Legend: P trained tokens of a row.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from dora.core.ids import VersionId
from dora.errors import ConfigError, InvariantViolation
from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy, ShardedModel
from dora.trainer.packing import Row
from dora.transport.messages import Configure, TrainerSettings


class FrozenPolicy(ShardedModel):
    """A policy that is not trained; its shards have the data type of the computation."""

    def __init__(self, model_path: Path, *, policy: Policy, on_host: bool = False) -> None:
        """Load a folder in the layout of `policy`. `on_host`: see `ShardedModel`."""
        super().__init__(
            model_path,
            mesh=policy.mesh,
            dtype=policy.dtype,
            compiled=policy.compiled,
            frozen=True,
            on_host=on_host,
        )
        self.version: VersionId | None = None  #: None until `refresh`
        self._has_passes = False

    @torch.no_grad()
    def refresh(self, policy: Policy, *, version: VersionId) -> None:
        """Copy the weights of `policy`, which are those of `version`."""
        self.forget_passes()
        current = policy.loaded()
        for name, tensor in self.loaded().items():
            tensor.copy_(current[name])
        self.version = version

    def forget_passes(self) -> None:
        """Drop gathered weights, and the list of passes that FSDP2 would only clear in a backward pass."""
        if self._has_passes:
            self.model.reset_iter_state()
            self._has_passes = False

    @torch.no_grad()
    def logprobs(self, row: Row, *, temperature: float, fp32_head: bool) -> Tensor:
        """Return the [P] log-probs of the row's targets, in float32; a collective like the policy's own pass."""
        self._has_passes = True
        return logprobs(self.model, row, temperature=temperature, fp32_head=fp32_head)[0]

    def require(self, version: VersionId) -> None:
        """Raise InvariantViolation unless the weights are those of `version`."""
        if self.version != version:
            raise InvariantViolation(f"the proximal policy has version {self.version} in step {version + 1}")


class OtherPolicies:
    """The policies that an objective compares the trained policy with; a policy that it does not need is not loaded."""

    def __init__(self, order: Configure, *, policy: Policy, objective: Objective) -> None:
        settings = order.settings
        on_host = settings.copies == "host"
        self._policy = policy
        self._compute = partial(FrozenPolicy.logprobs, temperature=settings.temperature, fp32_head=settings.fp32_head)
        self._proximal = self._reference = None
        if objective.needs_copy(settings.updates):
            self._proximal = FrozenPolicy(Path(order.model_path), policy=policy, on_host=on_host)
        if objective.needs_reference:
            path = Path(objective.settings.kl_reference or order.model_path)
            self._reference = load_reference(path, policy=policy, on_host=on_host)

    def begin_step(self, version: VersionId) -> None:
        """Copy the weights of the policy, which are those of `version`, to the proximal policy."""
        if self._proximal is not None:
            self._proximal.refresh(self._policy, version=version)
        if self._reference is not None:
            self._reference.forget_passes()

    def proximal(self, row: Row, *, version: VersionId, update: int) -> Tensor | None:
        """Return [P] log π_o of `version`; None if it is not needed, as in the first update, where π_o is π."""
        if self._proximal is None or update == 0:
            return None
        self._proximal.require(version)
        return self._compute(self._proximal, row)

    def reference(self, row: Row) -> Tensor | None:
        """Return [P] log-probs of the reference policy; None if they are not needed."""
        return None if self._reference is None else self._compute(self._reference, row)


def count_copies(settings: TrainerSettings) -> int:
    """Return how many policies a rank holds in addition to the trained one: 0, 1 or 2."""
    of_run = ObjectiveConfig.model_validate_json(settings.objective)
    objective = Objective(of_run, longest=settings.max_new_tokens)
    return objective.needs_copy(settings.updates) + objective.needs_reference


def load_reference(model_path: Path, *, policy: Policy, on_host: bool = False) -> FrozenPolicy:
    """Load the reference policy; ConfigError unless it has the architecture of `policy`.

    The forward pass was checked, and the layout of rows chosen, for the architecture of `policy`.
    """
    try:
        reference = FrozenPolicy(model_path, policy=policy, on_host=on_host)
    except ConfigError as err:
        raise ConfigError(str(err).replace("model.path", "objective.kl_reference")) from err
    if _shapes(reference) != _shapes(policy):
        raise ConfigError(
            f"objective.kl_reference: {model_path} ({_name(reference)}) has another architecture than the policy "
            f"({_name(policy)}); give weights of the same one"
        )
    return reference


def _shapes(model: ShardedModel) -> tuple[str, dict[str, torch.Size]]:
    return _name(model), {name: parameter.shape for name, parameter in model.model.named_parameters()}


def _name(model: ShardedModel) -> str:
    return type(model.model).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of this name
