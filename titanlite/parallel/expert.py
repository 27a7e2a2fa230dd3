"""Expert parallel (GShard, arXiv 2006.16668): experts live on different ranks, and tokens travel to them and back.

A rank routes its own part of the tokens, whatever axis it owes that part to. Experts' own tensor parallel lies inside their
forward, so no gradient of a router is ever a part of a sum.
"""

import contextlib
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from titanlite.config import Parallelism
from titanlite.parallel import deepep
from titanlite.parallel.compat import all_gather_single, in_backward, reduce_scatter_single
from titanlite.parallel.mesh import Mesh
from titanlite.parallel.plan import ParallelPlan, matching
from titanlite.utils import logger


def apply_ep(part: nn.Module, mesh: Mesh, plan: ParallelPlan, cfg: Parallelism) -> None:
    """Deals the experts that the plan names out over the ranks of ep, splits each one's width over those of etp."""
    if not plan.experts:
        return
    ep, etp = mesh.degrees.ep, mesh.degrees.etp
    experts = matching(part, plan.experts)
    for module in experts.values():
        if ep * etp > 1:
            for name, parameter in list(module.named_parameters(recurse=False)):
                width = module.width_dims.get(name)
                placements = [Shard(0), Replicate() if width is None else Shard(width)]
                local = distribute_tensor(parameter, mesh.sparse["ep", "etp"], placements, src_data_rank=None)
                module.register_parameter(name, nn.Parameter(local, requires_grad=parameter.requires_grad))
            exchanged_by_deepep = cfg.expert_parallel_comm_backend == "deepep"
            module.forward = torch.compiler.disable(partial(_compute_local if exchanged_by_deepep else _spread, module, mesh.sparse))
        else:
            module.forward = torch.compiler.disable(module.forward)  # sizes that depend on the data
    for moe in mixtures_of(part):
        if cfg.expert_parallel_comm_backend == "deepep":
            moe.routed = partial(deepep.routed, moe, deepep.build_exchange(mesh.sparse.get_group("ep"), moe.args.n_experts))
        moe.router.register_forward_hook(_count)
        moe.experts.register_forward_pre_hook(partial(_count_served, moe.router))
        if mesh.degrees.cp * mesh.degrees.tp > 1:
            moe.sum_over_row = partial(_sum, mesh.rows.get_group("row"))
    if experts:
        logger.info(f"expert_parallel={ep} expert_tensor_parallel={etp} layers={len(experts)} data_parallel={mesh.degrees.efsdp}")


def mixtures_of(part: nn.Module) -> Iterator[nn.Module]:
    """Modules with a router and experts."""
    return (module for module in part.modules() if hasattr(module, "router") and hasattr(module, "experts"))


def _sum(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    dist.all_reduce(tensor, group=group)
    return tensor


# Dispatch


def _spread(experts: nn.Module, sparse: DeviceMesh, x_MD: Tensor, counts_X: Tensor) -> Tensor:
    """Rows sorted by expert -> what the experts make of them, in the same order. M may be another number on every rank of ep."""
    etp = sparse.get_group("etp")
    weights = {}
    for name, p in experts.named_parameters(recurse=False):
        width = experts.width_dims.get(name)
        weights[name] = p.to_local(grad_placements=[Shard(0), Partial() if width is None else Shard(width)])
        if width is None:
            weights[name] = _counted_once(weights[name], etp)
    if dist.get_world_size(etp) == 1:
        return _over_ep(experts, weights, sparse.get_group("ep"), x_MD, counts_X)
    # Each rank of etp has a part of every expert's width, so each must see the rows of all; sums come back to whose they are.
    ranks = dist.get_world_size(etp)
    counts_RX = counts_X.new_empty(ranks, len(counts_X))
    all_gather_single(counts_RX, counts_X[None].contiguous(), group=etp)
    x_RMD = _AllGather.apply(x_MD, etp)
    expert_of_row = torch.arange(len(counts_X), device=counts_X.device).repeat(ranks).repeat_interleave(counts_RX.flatten(), output_size=len(x_RMD))
    order = expert_of_row.argsort(stable=True)
    out = _over_ep(experts, weights, sparse.get_group("ep"), x_RMD[order], counts_RX.sum(0))
    return _ReduceScatter.apply(torch.empty_like(out).index_copy(0, order, out), etp)


def _compute_local(experts: nn.Module, sparse: DeviceMesh, x_MD: Tensor, counts_X: Tensor) -> Tensor:
    """Of rows that are where their experts are."""
    return experts.compute(x_MD, counts_X, **{name: p.to_local() for name, p in experts.named_parameters(recurse=False)})


def _counted_once(weight: Tensor, etp: dist.ProcessGroup) -> Tensor:
    """What all ranks of etp have alike, as this rank's part of a sum over them."""
    return weight if dist.get_rank(etp) == 0 else weight * 0


def _over_ep(experts: nn.Module, weights: dict[str, Tensor], group: dist.ProcessGroup, x_MD: Tensor, counts_X: Tensor) -> Tensor:
    ranks = dist.get_world_size(group)
    if ranks == 1:
        return experts.compute(x_MD, counts_X, **weights)
    sent = counts_X.view(ranks, -1)  # [rank, its experts]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=group)
    to, of = _splits(sent, len(x_MD)), _splits(received, len(x_MD))
    x = _AllToAll.apply(x_MD, of, to, group)
    # They lie by the rank they come from: sort them by expert.
    local = received.shape[1]
    expert_of_row = torch.arange(local, device=x.device).repeat(ranks).repeat_interleave(received.flatten(), output_size=len(x))
    order = expert_of_row.argsort(stable=True)
    out = experts.compute(x[order], received.sum(0), **weights)
    return _AllToAll.apply(torch.empty_like(out).index_copy(0, order, out), to, of, group)


def _splits(counts_RX: Tensor, n_rows: int) -> list[int]:
    """Rows of each rank; `n_rows`, what this rank has of its own, says how many there would be if loads were even."""
    return counts_RX.sum(1).tolist()


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.back = (sent, received, group)
        return _all_to_all(x, received, sent, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return _all_to_all(gradient, *ctx.back), None, None, None


def _all_to_all(x: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(sum(received), *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=group)
    return out


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _all_gather(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return _reduce_scatter(gradient, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _reduce_scatter(x, group)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return _all_gather(gradient, ctx.group), None


def _all_gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(dist.get_world_size(group) * len(x), *x.shape[1:])
    all_gather_single(out, x.contiguous(), group=group)
    return out


def _reduce_scatter(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    out = x.new_empty(len(x) // dist.get_world_size(group), *x.shape[1:])
    reduce_scatter_single(out, x.contiguous(), group=group)
    return out


# Load


def _count(router: nn.Module, inputs: tuple, outputs: tuple[Tensor, Tensor, Tensor]) -> None:
    """Adds up what the step's training tokens choose: not those of validation, and not once more where blocks are recomputed."""
    if not torch.is_grad_enabled() or in_backward():
        return
    chosen, _, scores = outputs
    loads = _loads_of(router, scores.device)
    loads[:-2].scatter_add_(0, chosen.flatten(), torch.ones_like(chosen.flatten(), dtype=torch.float64))
    loads[-2] += torch.special.entr(scores.detach()).sum()
    loads[-1] += chosen.numel()


def _count_served(router: nn.Module, experts: nn.Module, inputs: tuple[Tensor, Tensor]) -> None:
    if torch.is_grad_enabled() and not in_backward():
        _loads_of(router, inputs[0].device)[-1] -= len(inputs[0])


def _loads_of(router: nn.Module, device: torch.device) -> Tensor:
    """[X + 2] fp64, of this step and rank: choices of each expert, the sum of the scores' entropies, choices that were dropped."""
    if not hasattr(router, "loads"):
        router.loads = torch.zeros(router.args.n_experts + 2, dtype=torch.float64, device=device)
    return router.loads


def set_loss_scale(parts: list[nn.Module], scale: Tensor) -> None:
    """Of the balance loss, before a step's first forward."""
    for part in parts:
        for moe in mixtures_of(part):
            moe.loss_scale = scale


@torch.no_grad()
def update_routers(parts: list[nn.Module], mesh: Mesh) -> dict[str, float]:
    """Once a step: moves the experts' biases against their loads and begins to count anew. Collective.

    Returns, of all layers: the largest load of an expert over the mean, the mean entropy of a token's scores in nats, how many
    experts no token chose, how many choices there were and how many of them were dropped.
    """
    routers = [moe.router for part in parts for moe in mixtures_of(part)]
    largest, sums = torch.zeros(1, dtype=torch.float64, device=mesh.device), torch.zeros(5, dtype=torch.float64, device=mesh.device)
    if routers:
        loads = torch.stack([_loads_of(router, mesh.device) for router in routers])
        dist.all_reduce(loads, group=mesh.stages.get_group("stage"))
        for router, load in zip(routers, loads):
            counts = load[:-2]
            if router.expert_bias is not None:
                router.expert_bias += router.args.bias_speed * (counts.mean() - counts).sign()
            largest = torch.maximum(largest, counts.max() / counts.mean())
            sums += torch.stack([load[-2], counts.sum() / router.args.top_k, (counts == 0).sum(), counts.sum(), load[-1]])
            router.loads.zero_()
    if mesh.degrees.pp > 1:
        dist.all_reduce(largest, dist.ReduceOp.MAX, mesh.stages.get_group("pp"))
        dist.all_reduce(sums, group=mesh.stages.get_group("pp"))
    entropies, tokens, dead, rows, dropped = sums.tolist()
    return {
        "expert_load_max": largest.item(),
        "router_entropy": entropies / tokens,
        "dead_experts": dead,
        "routed_rows": rows,
        "dropped_rows": dropped,
    }


# Replay


@contextlib.contextmanager
def recorded_routing(parts: list[nn.Module]) -> Iterator[list[list[Tensor]]]:
    """Inside, a list for each router, in the order of the model, takes in what it chooses [B, S, C], microbatch by microbatch."""
    routers = [moe.router for part in parts for moe in mixtures_of(part)]
    choices: list[list[Tensor]] = [[] for _ in routers]

    def record(choose: Callable, kept: list[Tensor], scores: Tensor) -> Tensor:
        chosen = choose(scores)
        if not in_backward():
            kept.append(chosen)
        return chosen

    with _choosing(routers, [partial(record, router.choose, kept) for router, kept in zip(routers, choices)]):
        yield choices


@contextlib.contextmanager
def replayed_routing(parts: list[nn.Module], choices: list[list[Tensor]]) -> Iterator[None]:
    """Inside, routers choose what `recorded_routing` took in, in the same order, whatever their weights are.

    So training can see the experts that a rollout saw (arXiv 2510.11370). Blocks may be recomputed: their backward passes
    come in the order of their forward passes.
    """

    def replay(ahead: deque[Tensor], behind: deque[Tensor], scores: Tensor) -> Tensor:
        if in_backward():
            return behind.popleft()
        chosen = ahead.popleft()
        if torch.is_grad_enabled():
            behind.append(chosen)
        return chosen

    routers = [moe.router for part in parts for moe in mixtures_of(part)]
    with _choosing(routers, [partial(replay, deque(recorded), deque()) for recorded in choices]):
        yield


@contextlib.contextmanager
def _choosing(routers: list[nn.Module], choosers: list[Callable]) -> Iterator[None]:
    before = [router.choose for router in routers]
    for router, choose in zip(routers, choosers, strict=True):
        router.choose = choose
    try:
        yield
    finally:
        for router, choose in zip(routers, before):
            router.choose = choose
