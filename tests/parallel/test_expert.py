"""Experts on several ranks: what travels, what is counted, dropped and replayed, and how weights start."""

from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.scale import fake_rank, fake_step
from tests.parallel.test_scale import in_a_process
from tests.ranks import run_ranks
from titanlite.config import load_config, override
from titanlite.models.moe import Experts, MoE, MoEArgs, Router, grouped_mm
from titanlite.parallel import expert
from titanlite.parallel.expert import mixtures_of, recorded_routing, replayed_routing
from titanlite.trainer import join, setup, train_step, validation_loss
from titanlite.verify.compare import _microbatches
from titanlite.verify.layouts import base_config, parse_layout


def config(family: str, layout: str, **values):
    cfg = parse_layout(layout, base_config(load_config(f"train_configs/{family}_debug.toml")[0])).cfg
    return override(cfg, {key.replace("__", "."): value for key, value in values.items()})


def moe_of(args: MoEArgs, dim: int = 16, dtype: torch.dtype = torch.float64) -> MoE:
    torch.manual_seed(0)
    moe = MoE(dim, args).to(dtype)
    for parameter in moe.parameters():
        parameter.data.normal_(0.0, 0.3)
    return moe


# The layer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_products_are_each_experts_own_also_where_one_has_no_row(dtype):
    x, w = torch.randn(24, 16, dtype=dtype, requires_grad=True), torch.randn(4, 32, 16, dtype=dtype, requires_grad=True)
    ends = torch.tensor([8, 8, 9, 24], dtype=torch.int32)
    out = grouped_mm(x, w, ends)
    expected = torch.cat([x[:8] @ w[0].T, x[8:9] @ w[2].T, x[9:] @ w[3].T])
    assert torch.equal(out, expected) or (out - expected).abs().max() <= 8 * torch.finfo(dtype).eps * expected.abs().max()
    out.square().sum().backward()
    assert w.grad[1].eq(0).all() and w.grad[2].any() and x.grad.any(1).all()


def test_a_token_gets_the_weighted_sum_of_its_experts():
    moe, x = moe_of(MoEArgs(5, 2, 8, n_shared=1)), torch.randn(2, 3, 16, dtype=torch.float64)
    chosen, weights, _ = moe.router(x)
    e = moe.experts
    for b, s in ((0, 0), (1, 2)):
        token = x[b, s]
        expected = moe.shared_experts(token)
        for i, weight in zip(chosen[b, s], weights[b, s]):
            expected = expected + weight * (e.w2[i] @ (torch.nn.functional.silu(e.w1[i] @ token) * (e.w3[i] @ token)))
        torch.testing.assert_close(moe(x)[b, s], expected)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 3, dtype=torch.float64))


def test_a_bias_changes_who_is_chosen_and_not_the_weights():
    router = Router(16, MoEArgs(6, 2, 8, score="sigmoid", normalize=False, bias_speed=0.1)).double()
    router.gate.weight.data.normal_(0.0, 0.3)
    router.init_buffers(torch.device("cpu"))
    x = torch.randn(1, 50, 16, dtype=torch.float64)
    scores = router.gate(x).sigmoid()
    router.expert_bias[3] = 10.0
    chosen, weights, _ = router(x)
    assert (chosen == 3).any(-1).all()
    torch.testing.assert_close(weights, scores.gather(-1, chosen))


def test_groups_limit_the_choice_to_those_with_the_best_pairs():
    router = Router(16, MoEArgs(8, 3, 8, score="sigmoid", n_groups=4, top_groups=2))
    scores = torch.rand(1, 100, 8, generator=torch.Generator().manual_seed(0))
    pairs = scores.view(100, 4, 2).sum(-1)
    for token, chosen in enumerate(router.best(scores)[0]):
        best = set(pairs[token].topk(2).indices.tolist())
        assert {i // 2 for i in chosen.tolist()} <= best
        inside = [i for i in range(8) if i // 2 in best]
        assert set(chosen.tolist()) == set(sorted(inside, key=lambda i: -scores[0, token, i])[:3])


def test_forced_balance_gives_every_expert_as_many_tokens():
    router = Router(16, MoEArgs(8, 2, 8))
    assert router.balanced(torch.rand(4, 8, 8)).flatten().bincount().tolist() == [8] * 8


def test_the_balance_loss_is_that_of_the_paper_and_reaches_the_router_only():
    args = MoEArgs(4, 2, 8, score="sigmoid", balance_loss=0.5)
    moe, x = moe_of(args), torch.randn(3, 10, 16, dtype=torch.float64)
    moe.loss_scale = torch.tensor(1 / 30, dtype=torch.float64)
    chosen, weights, scores = moe.router(x)
    moe.balanced_by_loss(weights, chosen, scores).sum().mul(0).backward()
    found = moe.router.gate.weight.grad.clone()
    moe.zero_grad()
    raw = moe.router.gate(x).sigmoid()
    s = raw / raw.sum(-1, keepdim=True)
    rows = []
    for row in range(3):
        f = torch.stack([(chosen[row] == i).sum() * 4 / (2 * 10) for i in range(4)])  # eq. 18
        rows.append(0.5 * (f * s[row].mean(0)).sum())  # eq. 17 and 20
    torch.stack(rows).mean().backward()  # over sequences of equal length
    torch.testing.assert_close(found, moe.router.gate.weight.grad)


def test_a_capacity_drops_the_least_weighty_rows_of_an_expert_and_no_other():
    moe, x = moe_of(MoEArgs(4, 2, 8, capacity_factor=0.5)), torch.randn(2, 16, 16, dtype=torch.float64)
    chosen, weights, _ = moe.router(x)
    order, counts = moe.sorted_rows(chosen, weights)
    assert counts.max() == 8  # half of 2 * 16 * 2 / 4
    served = set(order.tolist())
    for i in range(4):
        rows = [r for r in range(64) if chosen.flatten()[r] == i]
        best = sorted(rows, key=lambda r: -weights.flatten()[r])[:8]
        assert served & set(rows) == set(best)
    assert len(order) == counts.sum() == len(served)
    roomy = moe_of(MoEArgs(4, 2, 8, capacity_factor=4.0))
    torch.testing.assert_close(roomy(x), moe_of(MoEArgs(4, 2, 8))(x))


class _Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.n += 1
        return func(*args, **kwargs or {})


def test_kernel_launches_do_not_grow_with_the_number_of_experts():
    def launches(n_experts: int) -> int:
        moe, x = moe_of(MoEArgs(n_experts, 2, 16), dtype=torch.float32), torch.randn(2, 32, 16, requires_grad=True)
        with _Calls() as calls:
            moe(x).square().sum().backward()
        return calls.n

    assert launches(4) == launches(8) == launches(64)


# On several ranks


def test_dispatch_moves_no_more_bytes_than_tokens_times_choices_times_width():
    def moved():
        run = setup(cfg, join(cfg))
        sizes, plain = [], expert._all_to_all

        def counting(x, received, sent, group):
            sizes.append((x.numel(), sum(n for i, n in enumerate(sent) if i != dist.get_rank(group)) * x.shape[1]))
            return plain(x, received, sent, group)

        with mock.patch.object(expert, "_all_to_all", counting):
            train_step(run, _microbatches(run), run.loss_fn)
        return sizes

    cfg = config("qwen3_moe", "ep=2,accumulate=1")
    per_call = 8 * 32 * 2 * 64  # rows and tokens of a rank, choices, width
    ranks = run_ranks(moved, 2)
    for sizes in ranks:
        assert len(sizes) == 4 * 4  # four layers, there and back, forward and backward
        assert all(rows == per_call and 0 < travel < per_call for rows, travel in sizes[:8:2])
    there, back = (sum(travel for sizes in ranks for _, travel in sizes[start:8:2]) for start in (0, 1))
    assert there == back <= 2 * 4 * per_call


@pytest.mark.parametrize("layout", ["ep=2", "ep=2,etp=2,tp=2,fsdp=2", "fsdp=4"])
def test_a_rank_whose_experts_no_token_chooses_takes_part_and_they_are_called_dead(layout):
    def step():
        run = setup(cfg, join(cfg))
        for moe in mixtures_of(run.parts[0]):
            moe.router.choose = lambda scores: torch.arange(2).expand(*scores.shape[:-1], 2)  # the first two of eight
        measured = train_step(run, _microbatches(run), run.loss_fn)
        return measured.loss, measured.figures

    cfg = config("qwen3_moe", layout)
    ranks = {"ep=2": 2, "ep=2,etp=2,tp=2,fsdp=2": 4, "fsdp=4": 4}[layout]
    for loss, routing in run_ranks(step, ranks):
        assert 5 < loss < 7
        assert routing["dead_experts"] == 4 * 6 and routing["expert_load_max"] == 4
        assert routing["routed_rows"] == 4 * 16 * 32 * 2 and routing["dropped_rows"] == 0


def test_dropped_rows_are_counted_over_all_ranks():
    def step():
        run = setup(cfg, join(cfg))
        return train_step(run, _microbatches(run), run.loss_fn).figures

    cfg = config("qwen3_moe", "ep=2", model__moe_capacity_factor=0.25)
    (routing,) = {tuple(sorted(r.items())) for r in run_ranks(step, 2)}
    served = 4 * 4 * 8 * (8 * 32 * 2 // 8 // 2 // 4)  # layers, microbatches of both ranks, experts, a quarter of an even share
    routing = dict(routing)
    assert routing["routed_rows"] - served <= routing["dropped_rows"] < routing["routed_rows"]


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_replayed_routing_is_what_was_recorded_whatever_the_weights(recompute):
    def replay():
        run = setup(cfg, join(cfg))
        batches = _microbatches(run)
        with recorded_routing(run.parts) as first:
            loss = run.forward_backward(batches, run.loss_fn, torch.tensor(100.0, dtype=torch.float64))
        gradient = next(mixtures_of(run.parts[0])).experts.w1.grad.to_local().clone()
        run.optimizer.zero_grad()
        with replayed_routing(run.parts, first):
            again = run.forward_backward(batches, run.loss_fn, torch.tensor(100.0, dtype=torch.float64))
        same = torch.equal(next(mixtures_of(run.parts[0])).experts.w1.grad.to_local(), gradient) and loss.item() == again.item()
        for moe in mixtures_of(run.parts[0]):
            weight = moe.router.gate.weight
            (weight.to_local() if hasattr(weight, "to_local") else weight).data.neg_()
        with recorded_routing(run.parts) as other:
            validation_loss(run, iter(batches))
        with replayed_routing(run.parts, first), recorded_routing(run.parts) as third:
            validation_loss(run, iter(batches))
        alike = [all(map(torch.equal, a, b)) for a, b in zip(first, third)]
        return same, all(alike), any(not torch.equal(a[0], b[0]) for a, b in zip(first, other)), len(first), len(first[0])

    cfg = config("qwen3_moe", f"ep=2,recompute={recompute}")
    assert run_ranks(replay, 2) == [(True, True, True, 4, 2)] * 2


def test_experts_start_alike_under_every_layout_and_unlike_one_another():
    def whole():
        run = setup(cfg, join(cfg))
        w = dict(run.parts[0].named_parameters())["layers.0.moe.experts.w2"]
        return (w.full_tensor() if hasattr(w, "full_tensor") else w).detach().numpy().copy()

    cfg = config("qwen3_moe", "")
    expected = run_ranks(whole, 1)[0]
    assert abs(expected.mean()) < 1e-3 and len({expected[i].tobytes() for i in range(8)}) == 8
    for layout, ranks in (("ep=2", 2), ("etp=2,tp=2", 2), ("ep=2,etp=2,tp=2,fsdp=2", 4), ("fsdp=2,tp=2", 4)):
        cfg = config("qwen3_moe", layout)
        assert all((found == expected).all() for found in run_ranks(whole, ranks)), layout


@pytest.mark.parametrize(
    "values, shape",
    [
        ({"expert_parallel": 8, "data_parallel_shard": 32}, [16 // 4, 768, 2048]),
        ({"expert_parallel": 32, "data_parallel_shard": 128, "tensor_parallel": 2}, [4, 768 // 8, 2048]),  # more shards than experts
    ],
)
def test_experts_of_a_30b_on_many_ranks_are_dealt_out_and_sharded(values, shape):
    def shapes():
        with fake_rank(cfg, world_size, 0) as (parts, _):
            return list(parts[0].layers["0"].moe.experts.w1.to_local().shape)

    degrees = {f"parallelism.{key}_degree": value for key, value in values.items()}
    cfg = override(load_config("train_configs/qwen3_moe_30b.toml")[0], degrees | {"compile.enable": False})
    world_size = values["data_parallel_shard"] * values.get("tensor_parallel", 1)
    with mock.patch("tests.parallel.test_expert._shapes", shapes, create=True):
        assert in_a_process(_call_shapes) == shape


def _call_shapes():
    return _shapes()  # noqa: F821, a closure, which the fork inherits


def test_a_fake_step_of_experts_on_64_ranks_runs():
    assert in_a_process(_fake_step_on_64_ranks)


def _fake_step_on_64_ranks():
    cfg = override(
        load_config("train_configs/deepseek_v3_debug.toml")[0],
        {"parallelism.pipeline_parallel_degree": 2, "parallelism.expert_parallel_degree": 8, "parallelism.data_parallel_replicate_degree": 2},
    )
    with fake_rank(cfg, 64, 0) as (parts, mesh):
        fake_step(parts, mesh, cfg)
    return True


def test_experts_name_the_dimensions_that_can_be_split():
    for bias in (False, True):
        experts = Experts(16, MoEArgs(4, 2, 8, bias=bias))
        for name, parameter in experts.named_parameters():
            width = Experts.width_dims.get(name)
            assert (parameter.shape[width] == 8) if width is not None else name == "b2"
