"""The policies that the trained policy is compared with: the proximal and the reference policy, in the same process.

Where an adapter is trained, the proximal policy differs from the policy by its adapter alone. So does the reference,
unless it has a folder of its own: version 0 is the policy without the adapter or, if training began with one, with that
one. Both are then passes of the policy's own modules, and nothing is copied but adapters.

All three see the same rows of the same micro-batches, one after the other (periodic asynchrony, arXiv 2511.18871), so
that no pass waits for a whole batch. Their layout over the ranks, kernels and temperature are the same: with equal
weights, log-probs are equal to the bit.
Invariant: a copy has no gradients and no optimizer state, and its weights only change in `refresh`.
Legend: P trained tokens of a row.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from dora.core.ids import VersionId
from dora.errors import ConfigError, InvariantViolation
from dora.objectives.objective import Objective
from dora.objectives.settings import ObjectiveConfig
from dora.trainer.adapters import PROXIMAL, REFERENCE, Adapters
from dora.trainer.loading import tensors_of
from dora.trainer.logprobs import logprobs
from dora.trainer.model import Policy, ShardedModel
from dora.trainer.packing import Row
from dora.trainer.replay import replayed
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
        with replayed(self.model, row):
            return logprobs(self.model, row, temperature=temperature, fp32_head=fp32_head)[0]

    def require(self, version: VersionId) -> None:
        """Raise InvariantViolation unless the weights are those of `version`."""
        require_version(self.version, version)


class OfAdapter:
    """The policy that the trained one would be with another adapter."""

    def __init__(self, policy: Policy, adapters: Adapters, *, adapter: str | None) -> None:
        """`adapter`: None: without one."""
        self._policy, self._adapters, self._adapter = policy, adapters, adapter
        self.version: VersionId | None = None  #: None until `refresh`

    def refresh(self, policy: Policy, *, version: VersionId) -> None:
        """Copy the adapter of `policy`, which is that of `version`."""
        policy.reshard()
        self._adapters.refresh()
        self.version = version

    def forget_passes(self) -> None:
        """Do nothing: FSDP2 clears the list of passes in the backward pass of the policy."""

    @torch.no_grad()
    def logprobs(self, row: Row, *, temperature: float, fp32_head: bool) -> Tensor:
        """Return what `FrozenPolicy.logprobs` does, where the policy already replays the row's experts."""
        with self._adapters.using(self._adapter):
            return logprobs(self._policy.model, row, temperature=temperature, fp32_head=fp32_head)[0]

    def require(self, version: VersionId) -> None:
        """Raise InvariantViolation unless the adapter is that of `version`."""
        require_version(self.version, version)


def require_version(found: VersionId | None, version: VersionId) -> None:
    """Raise InvariantViolation unless the proximal policy is that of `version`."""
    if found != version:
        raise InvariantViolation(f"the proximal policy has version {found} in step {version + 1}")


class OtherPolicies:
    """The policies that an objective compares the trained policy with; a policy that it does not need is not loaded."""

    def __init__(self, order: Configure, *, policy: Policy, objective: Objective) -> None:
        settings = order.settings
        on_host = settings.copies == "host"
        self._policy = policy
        self._temperature, self._fp32_head = settings.temperature, settings.fp32_head
        self._proximal: FrozenPolicy | OfAdapter | None = None
        self._reference: FrozenPolicy | OfAdapter | None = None
        adapters, reference = policy.adapters, objective.settings.kl_reference
        if objective.needs_copy(settings.updates):
            if adapters is None:
                self._proximal = FrozenPolicy(Path(order.model_path), policy=policy, on_host=on_host)
            else:
                self._proximal = OfAdapter(policy, adapters, adapter=PROXIMAL)
        if objective.needs_reference:
            if adapters is None or reference:
                path = Path(reference or order.model_path)
                self._reference = load_reference(path, policy=policy, on_host=on_host)
            else:
                adapter = REFERENCE if adapters.settings.begins_with else None
                self._reference = OfAdapter(policy, adapters, adapter=adapter)

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

    def _compute(self, policy: FrozenPolicy | OfAdapter, row: Row) -> Tensor:
        return policy.logprobs(row, temperature=self._temperature, fp32_head=self._fp32_head)


def count_copies(settings: TrainerSettings) -> int:
    """Return how many policies a rank holds in addition to the trained one, adapters left out: 0, 1 or 2."""
    objective = _objective(settings)
    if settings.lora is not None:
        return int(objective.needs_reference and bool(objective.settings.kl_reference))
    return objective.needs_copy(settings.updates) + objective.needs_reference


def frozen_adapters(settings: TrainerSettings) -> tuple[str, ...]:
    """Return the adapters that a rank holds in addition to the trained one."""
    if settings.lora is None:
        return ()
    objective = _objective(settings)
    needed = {
        PROXIMAL: objective.needs_copy(settings.updates),
        REFERENCE: objective.needs_reference and settings.lora.begins_with and not objective.settings.kl_reference,
    }
    return tuple(adapter for adapter, is_needed in needed.items() if is_needed)


def _objective(settings: TrainerSettings) -> Objective:
    of_run = ObjectiveConfig.model_validate_json(settings.objective)
    return Objective(of_run, longest=settings.max_new_tokens)


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
    return _name(model), {name: tensor.shape for name, tensor in tensors_of(model.model).items()}


def _name(model: ShardedModel) -> str:
    return type(model.model).__name__.removeprefix("FSDP")  # FSDP2 makes a subclass of this name
