"""A trainer that replays experts: rows of every layout, messages that it refuses, whole steps, and what they count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import (
    SETTINGS,
    chain_of,
    in_history,
    make_batch,
    make_groups,
    make_model_folder,
    start_job,
    with_experts,
)
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from dora.errors import ConfigError, ProtocolError
from dora.routers import find_routers
from dora.routing import RoutingShape
from dora.trainer import attention
from dora.trainer.balance import BALANCE, REPLAYED
from dora.trainer.batch import check, experts_of, pack
from dora.trainer.logprobs import logprobs
from dora.trainer.meshes import make_mesh
from dora.trainer.model import Policy
from dora.trainer.packing import Layout, make_row, prompts_of, split_passes, unshared_tokens
from dora.trainer.probe import Probe
from dora.trainer.replay import replayed
from dora.trainer.score import score
from dora.trainer.step import Trainer
from dora.transport.messages import NO_EXPERTS, NOT_ROUTED, Configure, MicroBatch, RankReady, StepDone, TrainerFailed
from tests.families import make_model
from tests.trainer.publishing import KeptVersions, make_saver

CPU = torch.device("cpu")
DTYPES: Final = (torch.float32, torch.bfloat16)
SHAPE = RoutingShape(num_layers=4, layers=(0, 1, 2, 3), num_experts=4, top_k=2)
R3 = {"objective": '{"router_replay": "r3", "kl_coefficient": 0.1}', "micro_batch_tokens": 100}


def batch_of(count: int, *, step: int = 0, version: int = 0, index: int = 0, last: bool = True) -> MicroBatch:
    return with_experts(
        make_batch(make_groups(count, version=version, seed=7 + index), step=step, index=index, last=last)
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("moe")
    make_model("qwen3_moe").save_pretrained(path)
    return path


@pytest.fixture
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [Layout(), Layout(padded=True)], ids=str)
def test_the_experts_of_a_row_are_those_of_its_tokens(layout: Layout) -> None:
    batch = batch_of(3)
    experts = experts_of(batch, SHAPE)
    assert experts is not None
    assert (experts == np.where(batch.routed[:, None, None] == 0, -1, batch.experts.astype(int))).all()
    members = [0, 1, 2, 5, 7]  # siblings are put together
    row, _ = pack(batch, members, advantages_nU=np.zeros((12, 1)), experts=experts, layout=layout, device=CPU)
    assert row.experts_BTLk is not None
    lengths, ends = batch.lengths[members], np.cumsum(batch.lengths)[members]
    expected = np.concatenate([experts[end - n : end] for end, n in zip(ends, lengths, strict=True)])
    is_token = row.uses_BT.numpy() == 1
    assert (row.experts_BTLk.numpy()[is_token] == expected).all()
    assert (row.experts_BTLk.numpy()[~is_token] == -1).all()
    assert is_token.any(axis=1).all()
    assert (is_token.sum() < is_token.size) == layout.padded


def test_prompts_are_shared_only_where_their_experts_are_equal() -> None:
    tokens, lengths = np.tile(np.arange(10), 3), [10, 10, 10]
    trained = np.array([7, 17, 27])
    experts = np.tile(np.arange(10, dtype=np.int16)[:, None, None], (3, 1, 1))
    experts[26] = 99  # a token of the third prompt
    layout = Layout(share_above=1.0)
    same, other = (prompts_of(tokens, lengths=lengths, trained=trained, experts=e) for e in (None, experts))
    assert same[0] == same[1] == same[2]
    assert other[0] == other[1] != other[2]
    assert unshared_tokens(lengths, other, layout=layout) == 7
    assert unshared_tokens(lengths, same, layout=layout) == 0
    assert split_passes(lengths, prompts=other, layout=layout, budget=16) == [[0, 1], [2]]


def test_a_shared_row_has_the_logprobs_and_gradients_of_its_sequences_alone() -> None:
    model, batch = make_model("qwen3_moe"), batch_of(2)
    model.set_attn_implementation(attention.NAME)
    experts = experts_of(batch, SHAPE)

    def run(members: list[int], layout: Layout) -> Tensor:
        row, _ = pack(batch, members, advantages_nU=np.zeros((8, 1)), experts=experts, layout=layout, device=CPU)
        with replayed(model, row):
            found_P = logprobs(model, row, temperature=1.0)[0]
            found_P.square().sum().backward()
        return found_P.detach()

    def gradient() -> Tensor:
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        model.zero_grad()
        return found

    alone_P, alone = torch.cat([run([n], Layout()) for n in range(8)]), gradient()
    for layout in (Layout(), Layout(share_above=1.0), Layout(padded=True)):
        torch.testing.assert_close(run(list(range(8)), layout), alone_P, rtol=0, atol=1e-5)
        assert float((gradient() - alone).norm()) <= 1e-5 * float(alone.norm())


#: Eight layers, 32 experts of which four are chosen; those of DeepSeek are in groups.
SHAPES: Final[dict[str, dict[str, Any]]] = {
    "qwen3_moe": {"num_experts": 32, "num_experts_per_tok": 4, "norm_topk_prob": True, "head_dim": 32},
    "deepseek_v3": {"n_routed_experts": 32, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2},
}


@pytest.mark.deep
@pytest.mark.parametrize("family", SHAPES)
def test_an_engine_in_float32_and_a_trainer_in_bfloat16_differ_less(family: str) -> None:
    count, length, prompt = 16, 64, 8
    sizes = {"hidden_size": 128, "num_hidden_layers": 8, "vocab_size": 256, **SHAPES[family]}
    models = [make_model(family, dtype=dtype, moe_intermediate_size=64, **sizes) for dtype in DTYPES]
    for model in models:
        for parameter, source in zip(model.parameters(), models[0].parameters(), strict=True):
            if parameter.dim() > 1:
                parameter.data.copy_(source.data if model is not models[0] else 0.08 / 0.15 * source.data)
    engine, trainer = models
    ids = torch.from_numpy(np.random.default_rng(0).integers(0, 256, (count, prompt)))
    torch.manual_seed(0)
    with torch.no_grad(), find_routers(engine).record() as recording:
        for _ in range(length - prompt):
            logits = engine(input_ids=ids, use_cache=False).logits[:, -1]
            ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], 1)
        recording.take()
        logprobs_BTV = engine(input_ids=ids, use_cache=False).logits.log_softmax(-1)
        experts = recording.take().numpy()
    engine_P = logprobs_BTV[:, prompt - 1 : -1].gather(-1, ids[:, prompt:, None]).flatten()
    trained = np.flatnonzero(np.tile(np.arange(length) >= prompt, count))
    trainer.set_attn_implementation(attention.NAME)

    def error(experts: Any) -> tuple[float, float]:
        row = make_row(ids.flatten().numpy(), lengths=[length] * count, trained=trained, experts=experts, device=CPU)
        with torch.no_grad(), replayed(trainer, row):
            error_P = (logprobs(trainer, row, temperature=1.0)[0] - engine_P).abs()
        return float(error_P.mean()), float(error_P.max())

    (mean, most), (mean_live, most_live) = error(experts), error(None)
    assert most <= most_live / 4
    assert mean <= mean_live / 2
    assert mean_live > 1e-2


def test_given_sequences_are_scored_with_given_experts(folder: Path) -> None:
    rng = np.random.default_rng(0)
    sequences, prompts = [rng.integers(0, 23, n).tolist() for n in (9, 14)], [3, 4]
    experts = [rng.random((n, 4, 4)).argsort(-1)[..., :2].astype(np.int16) for n in (9, 14)]
    found = score(folder, sequences, prompt_lengths=prompts, temperature=1.0, experts=experts)
    live = score(folder, sequences, prompt_lengths=prompts, temperature=1.0)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for tokens, prompt, ids, one, other in zip(sequences, prompts, experts, found, live, strict=True):
        find_routers(model).replay(torch.from_numpy(ids))
        with torch.no_grad():
            logits_TV = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].log_softmax(-1)
        expected = logits_TV[range(prompt - 1, len(tokens) - 1), tokens[prompt:]].numpy()
        np.testing.assert_allclose(one, expected, rtol=0, atol=1e-5)
        assert np.abs(other - expected).max() > 1e-2


# ---- messages -------------------------------------------------------------------------------------------------------


def test_ids_of_two_bytes_are_little_endian() -> None:
    shape = RoutingShape(num_layers=2, layers=(1,), num_experts=512, top_k=2)
    batch = make_batch(make_groups(1, version=0, seed=3)[:1], step=0, index=0, last=True)
    total = len(batch.tokens)
    ids = np.tile(np.array([[[511, 3]]], "<u2"), (total, 1, 1))
    batch = msgspec.structs.replace(batch, experts=ids.view(np.uint8), routed=np.ones(total, np.uint8))
    check(batch, max_staleness=0, vocab_size=23, routing=shape)
    found = experts_of(batch, shape)
    assert found is not None
    assert found.tolist() == [[[511, 3]]] * total


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"experts": NO_EXPERTS, "routed": NOT_ROUTED}, r"shapes \(0, 0, 0\) and \(0,\), expected \(\d+, 4, 2\)"),
        ({"routed": NOT_ROUTED}, r"shapes \(\d+, 4, 2\) and \(0,\)"),
        ({"layers": 3}, r"shapes \(\d+, 3, 2\)"),
        ({"top_k": 3}, r"shapes \(\d+, 4, 3\)"),
        ({"place": (1, 1), "ids": [2, 2]}, "token 1 has an expert twice in layer 1"),
        ({"place": (0, 3), "ids": [2, 4]}, "expert 4 of 4"),
        ({"mark": 3}, "a token is marked 3"),
    ],
)
def test_a_micro_batch_whose_experts_do_not_fit_is_refused(change: dict[str, Any], says: str) -> None:
    sizes = {name: change[name] for name in ("layers", "top_k") if name in change}
    batch = with_experts(make_batch(make_groups(1, version=0, seed=3), step=0, index=0, last=True), **sizes)
    experts, routed = batch.experts.copy(), batch.routed.copy()
    if "place" in change:
        experts[change["place"]] = change["ids"]
    routed[2] = change.get("mark", routed[2])
    batch = msgspec.structs.replace(batch, experts=experts, routed=routed)
    batch = msgspec.structs.replace(batch, **{name: change[name] for name in ("experts", "routed") if name in change})
    with pytest.raises(ProtocolError, match=rf"^micro-batch 0/0: experts to replay: {says}"):
        check(batch, max_staleness=0, vocab_size=23, routing=SHAPE)


def test_experts_that_nothing_replays_are_refused() -> None:
    check(make_batch([], step=0, index=0, last=True), max_staleness=0, vocab_size=23, routing=SHAPE)
    check(batch_of(1), max_staleness=0, vocab_size=23, routing=SHAPE)
    with pytest.raises(ProtocolError, match="experts to replay: some, though none are expected"):
        check(batch_of(1), max_staleness=0, vocab_size=23)


# ---- steps ----------------------------------------------------------------------------------------------------------


class Rank:
    """A trainer of this process, and what it reported."""

    def __init__(self, folder: Path, **changes: Any) -> None:
        self.sent: list[Any] = []
        settings = msgspec.structs.replace(SETTINGS, **changes)
        order = Configure(
            run_id="replay", model_path=str(folder), settings=settings, memory_root="", durable_root="",
            checkpoints="", resume_from=(), may_start_over=False, chain=chain_of(0), epoch=0, fence="",
        )  # fmt: skip
        self.policy = Policy(folder, mesh=make_mesh("cpu"), dtype=torch.float32)
        self.versions = KeptVersions(self.policy)
        self.trainer = Trainer(
            order, end=self, policy=self.policy, layout=Layout(share_above=1.0),  # type: ignore[arg-type]
            publisher=self.versions, saver=make_saver(order),  # type: ignore[arg-type]
        )  # fmt: skip
        self.trainer.start()

    def send(self, message: object) -> None:
        self.sent.append(message)

    def train(self, *batches: MicroBatch) -> dict[str, float]:
        for batch in batches:
            self.trainer.train(in_history(batch))
        return next(m.metrics for m in reversed(self.sent) if isinstance(m, StepDone))


@pytest.mark.usefixtures("_alone")
def test_a_step_replays_in_all_policies_and_counts_what_it_replays(folder: Path) -> None:
    rank = Rank(folder, **R3)
    batch, empty = batch_of(4), make_batch([], step=0, index=1, last=True)
    found = rank.train(msgspec.structs.replace(batch, last=False), empty)
    assert found.keys() >= BALANCE.keys() | REPLAYED.keys()
    assert found["all/kl_reference"] == 0.0, "the reference is the policy, and replays the same experts"
    read = np.ones(len(batch.tokens), bool)
    read[np.cumsum(batch.lengths) - 1] = False
    assert found["routing_unknown_frac"] == pytest.approx((batch.routed[read] == 0).mean())
    assert found["routing_later_frac"] == pytest.approx((batch.routed[read] == 2).mean())
    assert 0.2 < found["routing_changed_frac"] < 0.8, "of experts at random"
    assert found["routing_unshared_frac"] == 0.0
    assert find_routers(rank.policy.model)._routers[0].table is None


@pytest.mark.usefixtures("_alone")
def test_changed_choices_are_told_by_staleness(folder: Path) -> None:
    """At learning rate 0. Fresh tokens have what the trainer chooses itself, stale ones have all other experts."""
    rank = Rank(folder, **{**R3, "max_staleness": 2, "learning_rate": 0.0})
    for step in range(2):
        rank.train(msgspec.structs.replace(batch_of(1), step=step, versions=np.full(4, step, np.int32)))
    batch = make_batch(make_groups(4, version=0, seed=5), step=2, index=0, last=True)
    row, _ = pack(batch, range(16), advantages_nU=np.zeros((16, 1)), layout=Layout(), device=CPU)
    with torch.no_grad(), find_routers(rank.policy.model).record() as recording:
        logprobs(rank.policy.model, row, temperature=1.0)
        own = recording.take()[-len(batch.tokens) :].numpy()
    rank.policy.reshard()
    others = np.argsort((np.arange(4)[:, None] == own[:, :, None, :]).any(-1), axis=-1, kind="stable")[..., :2]
    is_stale = np.repeat(np.arange(16) >= 8, batch.lengths)
    experts = np.where(is_stale[:, None, None], others, own).astype(np.uint8)
    versions = np.where(np.arange(16) >= 8, 0, 2).astype(np.int32)
    known = np.ones(len(batch.tokens), np.uint8)
    found = rank.train(msgspec.structs.replace(batch, versions=versions, experts=experts, routed=known))
    fresh, stale = found["lag=0/routing_changed_frac"], found["lag=2/routing_changed_frac"]
    assert fresh == 0.0
    assert 0.5 < stale <= 1.0, "all in the first layer; after it, routers see other values"
    assert "lag=1/routing_changed_frac" not in found
    assert found["routing_changed_frac"] == pytest.approx(stale * is_stale.mean())


@pytest.mark.usefixtures("_alone")
def test_a_choice_that_the_trainer_would_make_itself_changes_nothing(folder: Path) -> None:
    live, replaying = (
        Rank(folder),
        Rank(folder, objective='{"preset": "dapo", "weight_high": 1.5, "router_replay": "r3"}'),
    )
    batch = make_batch(make_groups(4, version=0, seed=7), step=0, index=0, last=True)
    row, _ = pack(batch, range(16), advantages_nU=np.zeros((16, 1)), layout=Layout(), device=CPU)
    with torch.no_grad(), find_routers(live.policy.model).record() as recording:
        logprobs(live.policy.model, row, temperature=1.0)
        own = recording.take()[-len(batch.tokens) :].numpy().astype(np.uint8)
    live.policy.reshard()
    known = np.ones(len(own), np.uint8)
    found = replaying.train(msgspec.structs.replace(batch, experts=own, routed=known))
    expected = live.train(batch)
    assert found["routing_changed_frac"] == 0.0
    timed = {"busy_s", "close_s", "write_wait_s"}
    assert {name: found[name] for name in expected.keys() - timed} == {n: expected[n] for n in expected.keys() - timed}
    for name, weight in live.versions.weights[-1].items():
        assert torch.equal(replaying.versions.weights[-1][name], weight)


@pytest.mark.usefixtures("_alone")
def test_loads_are_those_of_the_tokens_of_the_step(folder: Path) -> None:
    """All replayed tokens have the same experts, so two experts have all the load of a layer."""
    batch = make_batch(make_groups(2, version=0, seed=7), step=0, index=0, last=True)
    total = len(batch.tokens)
    ids = np.tile(np.array([[1, 3]], np.uint8), (total, 4, 1))
    batch = msgspec.structs.replace(batch, experts=ids, routed=np.ones(total, np.uint8))
    found = Rank(folder, **R3).train(batch)
    assert (found["expert_load_mean"], found["expert_load_max"], found["experts_unused_frac"]) == (2.0, 2.0, 0.5)


@pytest.mark.usefixtures("_alone")
def test_loads_are_counted_without_replay_too_and_not_of_dense_models(folder: Path, tmp_path: Path) -> None:
    batch = make_batch(make_groups(2, version=0, seed=7), step=0, index=0, last=True)
    found = Rank(folder).train(batch)
    assert found.keys() >= BALANCE.keys()
    assert not found.keys() & REPLAYED.keys()
    assert 1.0 <= found["expert_load_mean"] <= found["expert_load_max"] <= 4.0
    assert not Rank(make_model_folder(tmp_path)).train(batch).keys() & BALANCE.keys()


@pytest.mark.usefixtures("_alone")
def test_routers_that_choose_in_another_way_train_without_metrics_of_loads(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = Qwen3MoeTopKRouter.forward

    def twice(router: Any, hidden: Tensor) -> Any:
        torch.topk(hidden.flatten(0, -2)[:, :4], 2)
        return forward(router, hidden)

    monkeypatch.setattr(Qwen3MoeTopKRouter, "forward", twice)
    batch = make_batch(make_groups(2, version=0, seed=7), step=0, index=0, last=True)
    assert not Rank(folder).train(batch).keys() & BALANCE.keys()
    with pytest.raises(ConfigError, match="routers of qwen3_moe call topk 2 times for their choice; set it to off"):
        Rank(folder, **R3)


@pytest.mark.usefixtures("_alone")
def test_the_probe_replays_the_same_experts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At learning rate 0 all versions are equal, and other experts would have other log-probs."""
    monkeypatch.setattr(Probe, "_under", lambda *_: nullcontext())
    rank = Rank(folder, **R3, probe_tokens=64, learning_rate=0.0)
    rank.train(batch_of(1))
    found = rank.train(batch_of(2, step=1, version=0))
    assert found["probe_tokens"] > 0
    assert found["version_drift_k3"] < 1e-9


@pytest.mark.usefixtures("_alone")
def test_a_model_that_cannot_replay_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^objective.router_replay: qwen3 has no routers of experts; set it to off"):
        Rank(make_model_folder(tmp_path), **R3)


@pytest.mark.usefixtures("_alone")
def test_routers_that_ignore_what_is_replayed_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.routers._TopkAnswer._answer", lambda answer, scores, own: answer.recorded(own))
    monkeypatch.setattr("dora.routers._TopkAnswer.recorded", lambda answer, own: _keep(answer, own), raising=False)
    with pytest.raises(ConfigError, match=r"do not send tokens to the experts that are replayed; set it to off"):
        Rank(folder, **R3)


def _keep(answer: Any, own: Any) -> Any:
    if answer._router.recorded is not None:
        answer._router.recorded.append(own.indices.to(torch.int16))
    return own


@pytest.mark.usefixtures("_alone")
@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe", "minimax_m2", "lfm2_moe", "ernie4_5_moe", "afmoe"])
def test_biases_of_the_choice_are_published_as_they_were_read(family: str, tmp_path: Path) -> None:
    """Families that keep loads even by a bias of each expert: it has no gradient, and training leaves it alone."""
    model = make_model(family)
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    biases = {name: t for name, t in tensors.items() if "correction_bias" in name or "expert_bias" in name}
    assert biases
    for bias in biases.values():
        torch.nn.init.normal_(bias, std=0.1)
    model.save_pretrained(tmp_path)
    rank = Rank(tmp_path)
    before = {name: tensor.clone() for name, tensor in rank.versions.weights[0].items()}
    rank.train(make_batch(make_groups(2, version=0, seed=7), step=0, index=0, last=True))
    after = rank.versions.weights[-1]
    kept = [name for name in after if "bias" in name and ("correction" in name or "expert_bias" in name)]
    assert len(kept) == len(biases)
    for name in kept:
        assert before[name].any()
        assert torch.equal(after[name], before[name]), name
    changed = [name for name in after if not torch.equal(after[name], before[name])]
    assert any("gate" in name or "router" in name for name in changed)


@pytest.mark.deep
async def test_ranks_of_which_one_has_nothing_replay_and_refuse_what_does_not_fit(folder: Path, tmp_path: Path) -> None:
    async with start_job(tmp_path, folder, **R3) as job:
        await job.until(RankReady, count=2)
        await job.end.send(0, in_history(batch_of(2)))
        await job.end.send(1, in_history(make_batch([], step=0, index=0, last=True)))
        trained = await job.until(StepDone)
        assert trained.metrics["routing_unknown_frac"] < 0.5
        assert trained.metrics["experts_unused_frac"] == 0.0
        answers = make_groups(1, version=1, seed=5)
        await job.end.send(0, in_history(make_batch(answers, step=1, index=0, last=True)))
        failed = await job.until(TrainerFailed)
        assert failed.is_final
        assert failed.reason.startswith("micro-batch 1/0: experts to replay: shapes (0, 0, 0)")
