"""What `dora plan` searches, and what its results mean as settings of a workload file or of a configuration."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import tomli_w

from dora.app.estimate import (
    BANDWIDTH,
    BYTES,
    FLOPS,
    STEP_BASE_S,
    Shapes,
    kv_bytes_per_token,
    starts_all_on_gpus,
    training_rate,
)
from dora.app.fetch import fetch_small
from dora.app.gpu_plan import Gpus
from dora.app.settings import CONFIG_REGIME, workload_of
from dora.app.simulate import from_file, from_run, is_workload
from dora.app.trainer_check import outline_of
from dora.config.load import as_toml, read_toml, set_key, without_unset
from dora.config.load import load as load_config
from dora.config.rules import may_serve_adapters, problems
from dora.config.schema import Config
from dora.core.decode_time import DecodeTime
from dora.errors import ConfigError
from dora.journal.run_folder import RunFolder
from dora.seed.policy import model_folder
from dora.sim.server import SimulatedServer
from dora.sim.workload import WIDTHS, AdapterUse, Workload, checked, with_overrides

#: Seconds that a request adds to a decoding step of an H100, as in launch/workloads/search-agent.toml.
PER_REQUEST_S: Final = 2.8e-5
#: Seconds to read a token of a prompt, by the model's parameters: half of an H100's peak of 1e15 FLOP/s.
PREFILL_S: Final = 2 / 5e14
#: Share of a GPU's memory that its processes may use.
USABLE: Final = 0.9
#: Slots of a server of one GPU, if the configuration has none.
SLOTS: Final = 256


#: Keys of a workload that a plan may change, and their names in a configuration.
_KEYS: Final = {
    "job.strategy": "rollout.strategy",
    "job.max_staleness": "rollout.max_staleness",
    "fleet.server.slots": "engine.slots",
    "train.micro_batch_tokens": "trainer.micro_batch_tokens",
}


@dataclass(frozen=True, slots=True)
class Question:
    """What is to be planned."""

    workload: Workload  #: without a choice of a split
    given: Workload  #: as it is given
    note: str  #: where lengths and times come from
    fits: Callable[[Workload], bool]  #: whether a rank has enough memory
    tables: dict[str, Any]  #: of the file, into which a plan is written
    config: Config | None = None  #: if the file is a configuration, not a workload
    has_nodes: bool = False  #: whether the devices are the GPUs of its nodes

    def changes(self, planned: Workload) -> dict[str, Any]:
        """Return the settings of the file that a plan changes, by dotted key."""
        old, new = _flat(self.given), _flat(planned)
        changed = {key: value for key, value in new.items() if key not in old or value != old[key]}
        if self.config is None:
            return changed
        split = {
            "engine.tensor_parallel": planned.fleet.devices_per_instance,
            "trainer.ranks": planned.num_ranks * (self.config.trainer.ranks // self.config.data_groups),
            "engine.instances": planned.num_instances,
        }
        nodes = self.config.nodes
        if nodes.expected:
            del split["engine.instances"]  # a node has as many as its GPUs allow
        if self.has_nodes:
            on_nodes = planned.fleet.devices if nodes.train else planned.fleet.rollout_devices
            split["nodes.expected"] = on_nodes // nodes.gpus
            if nodes.train not in ("auto", 0):
                split["nodes.train"] = planned.train_devices // nodes.gpus
        given = {
            "engine.tensor_parallel": self.config.engine.tensor_parallel,
            "trainer.ranks": self.config.trainer.ranks,
            "engine.instances": self.config.num_managed,
            "engine.adapters": self.config.engine.adapters,
            "nodes.expected": nodes.expected,
            "nodes.train": nodes.train,
        }
        if planned.adapters.use != "none":
            split["engine.adapters"] = planned.adapters.use == "served"
        found = {name: value for name, value in split.items() if value != given[name]}
        keys = _KEYS if self.config.kv_tokens is None else {**_KEYS, "fleet.server.kv_tokens": "engine.kv_tokens"}
        if "train.micro_batch_tokens" in changed:
            changed["train.micro_batch_tokens"] //= self.config.trainer.parallel.context  # of each rank of a group
        return found | {name: changed[key] for key, name in keys.items() if key in changed}

    def why_not(self, planned: Workload) -> str:
        """Return why the run would be impossible as it is planned; "" if it is possible."""
        if not self.fits(planned):
            return "a trainer rank needs more memory than a device has"
        if self.config is None:
            return ""
        sections: dict[str, dict[str, Any]] = defaultdict(dict)
        for key, value in self.changes(planned).items():
            section, name = key.split(".")
            sections[section][name] = value
        changed = {name: getattr(self.config, name).model_copy(update=values) for name, values in sections.items()}
        return next(problems(self.config.model_copy(update=changed)), "")

    @property
    def uses(self) -> tuple[AdapterUse, ...]:
        """What may become of an adapter; (): anything."""
        config = self.config
        if config is None or not config.trainer.lora.rank or may_serve_adapters(config):
            return ()
        return ("merged",)

    def text(self, planned: Workload) -> str:
        """Return the file with the plan in it."""
        tables = msgspec.to_builtins(self.tables)
        for key, value in self.changes(planned).items():
            set_key(tables, f"{key}={as_toml(value)}")
        return tomli_w.dumps(tables)


def ask(path: Path | None, recorded: Path | None, *, gpus: str | None, overrides: Sequence[str]) -> Question:
    """Return the question of a workload, of a finished run, or of a configuration, on `gpus` if it is for GPUs."""
    if recorded is not None:
        if path is not None or gpus is not None:
            raise ConfigError(f"--from {recorded}: a finished run needs no file and no --gpus")
        return _of_run(recorded, overrides)
    if path is None or is_workload(path):
        if gpus is not None:
            raise ConfigError(f"--gpus {gpus}: is for configurations; a workload has its devices in fleet.devices")
        return _of_workload(*from_file(path), overrides)
    config = load_config(path, overrides, environ=os.environ)
    _require_own_servers(config, origin=str(path))
    tables = read_toml(path)
    for override in overrides:
        set_key(tables, override)
    if gpus is not None:
        return _on_gpus(config, Gpus.parse(gpus), tables, origin=str(path))
    if starts_all_on_gpus(config):
        raise ConfigError(f"{path}: a plan for GPUs needs their number and memory, such as --gpus 8x80GB")
    note = (
        f"{path}: lengths of regime {CONFIG_REGIME}, scaled to the token budget; times of an example server and "
        "trainer: `dora check CONFIG --measure FILE` measures the servers, then `dora plan FILE`\n"
    )
    workload = workload_of(config).with_changes(fleet={"widths": (1,)})
    return Question(checked(workload, origin=str(path)), workload, note, _always, tables, config)


def _require_own_servers(config: Config, *, origin: str) -> None:
    if config.engine.urls or not (config.num_managed or config.nodes.expected):
        raise ConfigError(f"{origin}: can be planned only if the run starts its servers (engine.instances)")


def _of_run(folder: Path, overrides: Sequence[str]) -> Question:
    """Return the question of a finished run, whose plan is for its configuration."""
    workload, note = from_run(folder)
    tables = read_toml(RunFolder(folder).config)
    config = load_config(tables, environ=os.environ)
    _require_own_servers(config, origin=str(folder))
    workload = _with_devices(workload, config)
    return Question(_changed(workload, overrides), workload, note, _always, tables, config)


def _with_devices(workload: Workload, config: Config) -> Workload:
    """Return the workload of a run, in which a server or a group of ranks is one device, with the devices of each."""
    width, of_group = config.engine.tensor_parallel, config.trainer.ranks // config.data_groups
    rollout = width * workload.num_instances
    return workload.with_changes(
        fleet={
            "devices": rollout + of_group * workload.num_ranks,
            "rollout_devices": rollout,
            "devices_per_instance": width,
            "widths": (width,),
        },
        train={
            "devices_per_rank": of_group,
            "tokens_s_per_device": workload.train.tokens_s_per_device / of_group,
        },
    )


def _of_workload(workload: Workload, note: str, overrides: Sequence[str]) -> Question:
    tables = without_unset(msgspec.to_builtins(workload))
    return Question(_changed(workload, overrides), workload, note, _always, tables)


def _changed(workload: Workload, overrides: Sequence[str]) -> Workload:
    """Return the workload with the changes of --set, which may take away the devices of its split."""
    return with_overrides(workload, overrides, splits=False) if overrides else workload


def _on_gpus(config: Config, gpus: Gpus, tables: dict[str, Any], *, origin: str) -> Question:
    """Return the question of a configuration on GPUs that need not be here, with the times of an H100."""
    if (config.trainer.device, config.engine.device) != ("cuda", "cuda"):
        raise ConfigError(f"--gpus {gpus}: needs engine.device and trainer.device to be cuda")
    config = fetch_small(config)
    model = model_folder(config.model.path, revision=config.model.revision)
    _, outline = outline_of(config, model, gpus.memory)
    longest, replicate = config.longest_slice, config.trainer.parallel.replicate
    workload = _with_times(workload_of(config), config, gpus, Shapes.read(model).of(outline))
    given = workload
    if config.kv_tokens:  # the plan lowers it if the memory is too small
        server = msgspec.structs.replace(workload.fleet.server, kv_tokens=config.kv_tokens)
        given = workload.with_changes(fleet={"server": server})

    def fits(planned: Workload) -> bool:
        tokens = max(planned.train.micro_batch_tokens // config.trainer.parallel.context, longest)
        alone = outline.forecast(tokens=tokens, longest=longest, ranks=1)
        ranks = max(1, planned.train_devices // replicate)
        is_whole = not config.nodes.expected or planned.train_devices % config.nodes.gpus == 0
        return is_whole and alone.total - alone.states + -(-alone.states // ranks) <= USABLE * gpus.memory

    note = (
        f"{origin} on {gpus}: lengths of regime {workload.lengths.regime}, scaled to the token budget; times of H100s "
        f"with {BANDWIDTH / 1e12:g} TB/s and {FLOPS / 1e12:g} TFLOP/s in training, assumed, not measured: "
        "`dora check CONFIG --measure FILE` on them, then `dora plan FILE`\n"
    )
    return Question(workload, given, note, fits, tables, config, has_nodes=bool(config.nodes.expected))


def _with_times(workload: Workload, config: Config, gpus: Gpus, shapes: Shapes) -> Workload:
    """Return the workload on these GPUs, with the times of H100s. A server has as many GPUs as its slots and KV are
    configured for, or the fewest that have room for the weights."""
    served = BYTES[config.trainer.publish_dtype]
    weights, kv = shapes.parameters * served, kv_bytes_per_token(shapes, dtype_bytes=served)
    given = config.engine.tensor_parallel if config.slots or config.kv_tokens else 1
    widths = (given, *(n for n in WIDTHS if n > given))
    width = next((n for n in widths if n * USABLE * gpus.memory > weights), widths[-1])
    room = max(0.0, width * USABLE * gpus.memory - weights)
    fitting = int(room / kv) if kv else 1 << 30
    server = SimulatedServer(
        slots=config.slots or SLOTS,
        kv_tokens=min(config.kv_tokens or fitting, fitting),
        decode=DecodeTime(
            base_s=STEP_BASE_S + weights / width / BANDWIDTH,
            per_request_s=PER_REQUEST_S,
            per_token_s=kv / width / BANDWIDTH,
        ),
        prefill_s_per_token=PREFILL_S * shapes.active / width,
    )
    fleet = {
        "devices": gpus.count,
        "widths": (1,) if config.engine.kind == "embedded" else WIDTHS,
        "rollout_devices": min(workload.fleet.rollout_devices, gpus.count - 1),
        "devices_per_instance": width,
        "device_bytes": USABLE * gpus.memory,
        "fixed_step_s": STEP_BASE_S,
        "weight_bytes": float(weights),
        "server": server,
    }
    return workload.with_changes(fleet=fleet, train={"tokens_s_per_device": training_rate(config, shapes)})


def _always(_: Workload) -> bool:
    return True


def _flat(part: msgspec.Struct, prefix: str = "") -> dict[str, Any]:
    """Return the values of nested structs by dotted key."""
    found: dict[str, Any] = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, msgspec.Struct) else {f"{prefix}{name}": value}
    return found
