"""What a run starts on this host."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import pytest

from dora.config.load import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.node.plan import ProcessPlan, TrainingNode, assign_gpus, plan_engines, plan_trainer
from dora.node.ports import free_port, interface_of, require_free_ports

ENVIRON = {"PATH": "/bin", "DORA_TOKEN": "of another run", "DORA_ENGINE_API_KEY": "key", "OMP_NUM_THREADS": "64"}


LOOPBACK = "lo" if sys.platform == "linux" else "lo0"


def config(*overrides: str) -> Config:
    return load(None, overrides, environ={"DORA_ENGINE_API_KEY": "sesame"})


def engines(*overrides: str) -> list[ProcessPlan]:
    return plan_engines(config(*overrides), model=Path("/m"), lease=Path("/run/lease"), environ=ENVIRON)


def trainer(*overrides: str, node: TrainingNode | None = None, environ: dict[str, str] | None = None) -> ProcessPlan:
    return plan_trainer(
        config(*overrides),
        controller="tcp://127.0.0.1:5",
        token="sesame",
        lease=Path("/run/lease"),
        store=Path("/run/store"),
        environ=ENVIRON | (environ or {}),
        node=node,
    )


def test_there_is_one_engine_per_instance_with_a_unique_name():
    assert [plan.name for plan in engines("engine.instances=3")] == ["engine-0", "engine-1", "engine-2"]


def test_an_engine_listens_on_loopback_at_a_port_that_the_system_chooses():
    (plan,) = engines("engine.instances=1", "rollout.max_staleness=0")
    argv = " ".join(plan.argv)
    assert argv.startswith(f"{sys.executable} -m dora serve ")
    assert "--host 127.0.0.1 --port 0 " in argv
    assert "--model /m " in argv


def test_an_engine_decodes_in_the_type_that_is_published():
    (plan, *_) = engines("trainer.publish_dtype=bfloat16")
    assert plan.argv[plan.argv.index("--dtype") + 1] == "bfloat16"


def test_managed_servers_are_numbered_after_external_ones():
    urls = 'engine.urls=["http://a:1", "http://b:1", "http://c:1"]'
    assert engines(urls) == []
    assert [plan.name for plan in engines(urls, "engine.instances=2")] == ["engine-3", "engine-4"]
    assert config(urls, "engine.instances=2").num_instances == 5


def test_sglang_is_started_from_this_environment_on_a_port_chosen_at_its_start():
    (plan, *_) = engines(
        "engine.kind=sglang", "engine.tensor_parallel=2", 'engine.args=["--mem-fraction-static", "0.7"]'
    )
    argv = " ".join(plan.argv)
    assert argv.startswith(f"{sys.executable} -m dora.engine.sglang.serve ")
    assert "--model-path /m --host 127.0.0.1 --port {port} --device cpu " in argv
    assert "--tp-size 2 " in argv
    assert "--mem-fraction-static 0.7" in argv
    assert plan.has_port


def test_a_template_is_filled_in_and_unknown_placeholders_are_kept():
    command = """engine.command=["serve", "{model}", "--at={host}:{port}", "{slots}/{kv_tokens}", "{\\"a\\": 1}"]"""
    (plan, *_) = engines(command, "engine.slots=5", "engine.kv_tokens=1024")
    assert plan.argv == ("serve", "/m", "--at=127.0.0.1:{port}", "5/1024", '{"a": 1}')
    assert plan.has_port


def test_an_option_whose_value_is_unset_is_left_out():
    command = """engine.command=["serve", "{model}", "--slots", "{slots}", "--kv={kv_tokens}"]"""
    assert engines(command, "engine.kv_tokens=7000")[0].argv == ("serve", "/m", "--kv=7000")
    assert engines(command, "engine.slots=9", "engine.kv_tokens=7000")[0].argv[2:4] == ("--slots", "9")


def test_a_template_without_a_port_must_print_its_ready_line():
    assert not engines('engine.command=["serve", "{model}"]')[0].has_port


def test_managed_servers_get_their_environment():
    (plan, *_) = engines('engine.command=["serve"]', "engine.environment.HF_HUB_OFFLINE='1'")
    assert plan.env["HF_HUB_OFFLINE"] == "1"


@pytest.mark.parametrize(
    ("settings", "environ", "gpus"),
    [
        ((), {}, ["", ""]),
        (("engine.device=cuda",), {}, ["", ""]),  # the embedded engine is small: all share the first one
        (("engine.device=cuda", "engine.gpus=[0, 0]"), {}, ["0", "0"]),
        (("engine.kind=sglang", "engine.device=cuda"), {}, ["0", "1"]),
        (("engine.kind=sglang", "engine.device=cuda", "trainer.device=cuda"), {}, ["2", "3"]),
        (("engine.kind=sglang", "engine.device=cuda", "engine.tensor_parallel=2"), {}, ["0,1", "2,3"]),
        (("engine.kind=sglang", "engine.device=cuda", "engine.gpus=[3, 1]"), {}, ["3", "1"]),
        (
            ("engine.kind=sglang", "engine.device=cuda", "trainer.device=cuda"),
            {"CUDA_VISIBLE_DEVICES": "4,5,6,7"},
            ["6", "7"],
        ),
    ],
)
def test_servers_take_the_gpus_after_the_trainers(settings: tuple[str, ...], environ: dict[str, str], gpus: list[str]):
    wanted = config("engine.instances=2", "rollout.max_staleness=1", *settings)
    assert assign_gpus(wanted, environ=environ) == gpus


def test_missing_gpus_are_refused():
    wanted = config("engine.kind=sglang", "engine.device=cuda", "trainer.device=cuda")
    with pytest.raises(ConfigError, match=r"engine.gpus: GPU 5 is needed \(after the 2 of the trainer\), .* lists 4; "):
        assign_gpus(wanted, environ={"CUDA_VISIBLE_DEVICES": "0,1,2,3"})


def test_all_ranks_are_started_by_one_torchrun():
    argv = " ".join(trainer("trainer.ranks=3").argv)
    assert argv.startswith(f"{sys.executable} -m torch.distributed.run ")
    assert argv.endswith(" --local-addr 127.0.0.1 --nproc-per-node 3 -m dora train")


def test_ranks_of_a_custom_command_find_their_run_in_the_same_way():
    plan = trainer('trainer.command=["my-trainer", "--quick"]')
    assert plan.argv == ("my-trainer", "--quick")
    assert (plan.env["DORA_CONTROLLER"], plan.env["DORA_TOKEN"]) == ("tcp://127.0.0.1:5", "sesame")


SECOND = TrainingNode(nodes=2, index=1, ranks=4, master="10.0.0.5", port=29500, interface="eth1")


def test_ranks_of_one_host_meet_in_files_and_use_the_loopback_interface():
    env = trainer().env
    assert (env["DORA_STORE"], env["GLOO_SOCKET_IFNAME"]) == ("/run/store", LOOPBACK)
    assert not [name for name in env if name.startswith("PET_")]


def test_ranks_of_several_hosts_meet_at_the_first_one():
    plan = trainer("trainer.ranks=8", node=SECOND)
    assert " ".join(plan.argv).endswith(
        " -m torch.distributed.run --rdzv-backend static --nproc-per-node 4 -m dora train"
    )
    place = {name: value for name, value in plan.env.items() if name.startswith("PET_")}
    assert place == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "10.0.0.5",
        "PET_MASTER_PORT": "29500",
    }
    assert "DORA_STORE" not in plan.env


def test_a_custom_command_finds_its_place_among_several_hosts():
    plan = trainer('trainer.command=["my-trainer"]', node=SECOND)
    assert (plan.argv, plan.env["PET_NODE_RANK"]) == (("my-trainer",), "1")


def test_the_interface_of_collectives_is_that_of_the_container_or_else_that_of_the_address():
    both = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    assert [trainer(node=SECOND).env[name] for name in both] == ["eth1", "eth1"]
    chosen = trainer(node=SECOND, environ={"NCCL_SOCKET_IFNAME": "ib0"}).env
    assert [chosen[name] for name in both] == ["eth1", "ib0"]
    unknown = trainer(node=replace(SECOND, interface="")).env
    assert not [name for name in both if name in unknown]


def test_an_interface_is_found_from_an_address_or_a_name():
    assert interface_of("127.0.0.1") == interface_of("localhost") == LOOPBACK
    assert interface_of("192.0.2.1") == ""


def test_an_embedded_engine_is_told_the_least_duration_of_its_steps_and_the_length_of_drafts():
    assert engines("engine.min_step_ms=10")[0].argv[-2:] == ("--min-step-ms", "10.0")
    assert engines("engine.draft_tokens=4")[0].argv[-2:] == ("--draft-tokens", "4")
    assert not {"--min-step-ms", "--draft-tokens"} & {*engines()[0].argv}


@pytest.mark.parametrize(
    ("kind", "flags"),
    [
        ("embedded", "--dialect 0.5.23 --max-loras-per-batch 6 --max-lora-rank 8 --lora-target-modules q_proj,v_proj"),
        (
            "sglang",
            "--enable-lora --lora-strict-loading --max-loras-per-batch 6 --max-lora-rank 8 --lora-target-modules "
            "q_proj v_proj",
        ),
    ],
)
def test_servers_of_adapters_get_room_for_them_and_for_requests_without_one(kind: str, flags: str):
    lora = ("trainer.lora.rank=8", 'trainer.lora.targets=["v_proj", "q_proj"]', "rollout.max_staleness=2")
    (plan,) = engines("engine.adapters=true", "engine.instances=1", f"engine.kind={kind}", *lora)
    assert f" {flags} --last" in " ".join([*plan.argv, "--last"])
    (own,) = engines("engine.adapters=true", "engine.instances=1", 'engine.command=["own"]', *lora)
    assert own.argv == ("own",)


def test_no_secret_is_on_a_command_line():
    for plan in [*engines(), *engines("engine.kind=sglang"), trainer()]:
        assert "sesame" not in " ".join(plan.argv)
    assert trainer().env["DORA_TOKEN"] == "sesame"


def test_a_child_gets_the_environment_without_our_own_variables_and_what_it_needs():
    assert dict(engines("engine.threads=2")[0].env) == {
        "PATH": "/bin",
        "DORA_LEASE": "/run/lease",
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        "OMP_NUM_THREADS": "2",
        "PYTHONUNBUFFERED": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def test_collectives_of_servers_use_loopback_unless_configured_otherwise():
    assert engines()[0].env["GLOO_SOCKET_IFNAME"] == LOOPBACK
    assert engines("engine.environment.GLOO_SOCKET_IFNAME=eth0")[0].env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_a_port_in_use_is_refused_naming_field_and_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        says = f"status.port: the status endpoint cannot listen on 127.0.0.1:{port}"
        with pytest.raises(ConfigError, match=says):
            require_free_ports(config(f"status.port={port}"))


def test_a_port_for_later_is_none_that_the_system_may_give_away_meanwhile():
    ports = {free_port() for _ in range(50)}
    with ExitStack() as stack:
        given = [stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1] for _ in range(50)]
        assert max(ports) < min(given)
        for port in ports:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
    assert len(ports) > 40


def test_port_zero_is_always_free():
    require_free_ports(config("status.port=0"))
