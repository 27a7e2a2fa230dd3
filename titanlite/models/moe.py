"""A mixture of experts (arXiv 1701.06538) in plain PyTorch: no token is dropped unless a capacity is set.

Letters as in layers.py, and: N tokens, X experts, C experts a token chooses, M = N * C rows, one for each choice.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titanlite.models.layers import FeedForward


@dataclass(frozen=True)
class MoEArgs:
    n_experts: int
    top_k: int
    hidden_dim: int  # of one expert
    n_shared: int = 0  # experts that see every token
    score: str = "softmax"  # of the router's logits; or "sigmoid"
    normalize: bool = True  # the weights of a token's choices sum to one
    scale: float = 1.0  # of these weights
    n_groups: int = 1  # experts stand in groups, and a token chooses from
    top_groups: int = 1  # this many of them (arXiv 2412.19437)
    judges: int = 2  # the groups with the largest sum of this many scores
    bias_speed: float = 0.0  # by which an expert's bias in the choice follows its load, once a step; 0: no bias (arXiv 2408.15664)
    balance_loss: float = 0.0  # factor of the loss on uneven loads within a row (arXiv 2412.19437, eq. 17)

    bias: bool = False  # of the gate and of the experts
    clamp: float | None = None  # gpt-oss's activation, with its inputs kept below this; None: SwiGLU

    capacity_factor: float | None = None  # rows an expert takes at most, over N * C / X; the least weighty are dropped; None: all

    def __post_init__(self) -> None:
        if not 0 < self.top_k <= self.n_experts:
            raise ValueError(f"top_k={self.top_k}: a token cannot choose so many of n_experts={self.n_experts}: use 1 to {self.n_experts}")
        if self.n_groups < 1 or self.n_experts % self.n_groups:
            legal = [n for n in range(1, self.n_experts + 1) if self.n_experts % n == 0]
            raise ValueError(f"n_groups={self.n_groups} must divide n_experts={self.n_experts}: use one of {legal}")
        in_groups = self.top_groups * self.n_experts // self.n_groups
        if not 0 < self.top_groups <= self.n_groups or self.top_k > in_groups:
            least = -(-self.top_k * self.n_groups // self.n_experts)
            raise ValueError(
                f"top_groups={self.top_groups} of n_groups={self.n_groups} hold {in_groups} of n_experts={self.n_experts}, of which a token chooses "
                f"top_k={self.top_k}: use {least} to {self.n_groups}"
            )
        if self.n_groups > 1 and not 0 < self.judges <= self.n_experts // self.n_groups:
            raise ValueError(f"judges={self.judges}: a group has {self.n_experts // self.n_groups} experts: use 1 to so many")


class Router(nn.Module):
    """Chooses each token's experts and their weights. Scores are in fp32, or fp64 where the parameters are."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.gate = nn.Linear(dim, args.n_experts, bias=args.bias)
        # The bias is part of the state; it takes part in the choice only, and has no gradient.
        self.register_buffer("expert_bias", torch.zeros(args.n_experts) if args.bias_speed else None)
        self.choose = self.best

    def init_buffers(self, device: torch.device) -> None:
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros(self.args.n_experts, device=device, dtype=torch.float32)

    def forward(self, x_BSD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """-> chosen experts [B, S, C] int64, their weights [B, S, C], all scores [B, S, X] with a sum of one."""
        logits = self.gate(x_BSD)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scores = logits.softmax(-1) if self.args.score == "softmax" else logits.sigmoid()
        chosen = self.choose(scores.detach())
        weights = scores.gather(-1, chosen)
        if self.args.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.args.score == "sigmoid":
            scores = scores / scores.sum(-1, keepdim=True)
        return chosen, weights * self.args.scale, scores

    def best(self, scores_BSX: Tensor) -> Tensor:
        """[B, S, C] the highest scores, after the bias, in the best groups: those whose best `judges` have the largest sum."""
        if self.expert_bias is not None:
            scores_BSX = scores_BSX + self.expert_bias
        if self.args.n_groups > 1:
            groups = scores_BSX.unflatten(-1, (self.args.n_groups, -1))
            best = groups.topk(self.args.judges, -1).values.sum(-1).topk(self.args.top_groups, -1).indices
            kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
            scores_BSX = groups.masked_fill(~kept[..., None], -torch.inf).flatten(-2)
        return scores_BSX.topk(self.args.top_k, -1).indices

    def balanced(self, scores_BSX: Tensor) -> Tensor:
        """[B, S, C] each expert as often as any other, whatever the scores: for measurements."""
        shape = (*scores_BSX.shape[:-1], self.args.top_k)
        return torch.arange(scores_BSX[..., 0].numel() * self.args.top_k, device=scores_BSX.device).view(shape) % self.args.n_experts


class Experts(nn.Module):
    """Feed-forward layers, one an expert, over rows that are sorted by expert."""

    width_dims = {"w1": 1, "w2": 2, "w3": 1, "b1": 1, "b3": 1}

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.w1 = nn.Parameter(torch.empty(args.n_experts, args.hidden_dim, dim))
        self.w2 = nn.Parameter(torch.empty(args.n_experts, dim, args.hidden_dim))
        self.w3 = nn.Parameter(torch.empty(args.n_experts, args.hidden_dim, dim))
        if args.bias:
            self.b1 = nn.Parameter(torch.empty(args.n_experts, args.hidden_dim))
            self.b2 = nn.Parameter(torch.empty(args.n_experts, dim))
            self.b3 = nn.Parameter(torch.empty(args.n_experts, args.hidden_dim))

    def forward(self, x_MD: Tensor, counts_X: Tensor) -> Tensor:
        """Rows of expert 0, of expert 1, ..., `counts_X` of each."""
        return self.compute(x_MD, counts_X, **dict(self.named_parameters(recurse=False)))

    def compute(
        self, x_MD: Tensor, counts_X: Tensor, w1: Tensor, w2: Tensor, w3: Tensor,
        b1: Tensor | None = None, b2: Tensor | None = None, b3: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """With the weights of some experts, or of a part of each one's width F: then the results are parts of sums."""
        ends = counts_X.cumsum(0, dtype=torch.int32)
        rows = torch.arange(len(ends), device=ends.device).repeat_interleave(counts_X, output_size=len(x_MD)) if b1 is not None else None
        gate, up = grouped_mm(x_MD, w1, ends), grouped_mm(x_MD, w3, ends)
        if rows is not None:
            gate, up = gate + b1[rows], up + b3[rows]
        if self.args.clamp is None:
            hidden = F.silu(gate) * up
        else:
            gate, up = gate.clamp(max=self.args.clamp), up.clamp(-self.args.clamp, self.args.clamp)
            hidden = (up + 1) * gate * (1.702 * gate).sigmoid()
        out = grouped_mm(hidden, w2, ends)
        return out if rows is None else out + b2[rows]


def grouped_mm(x_MD: Tensor, w_XFD: Tensor, ends_X: Tensor) -> Tensor:
    """[M, F]: each row times the transpose of its expert's weight; those of expert i end before row `ends_X[i]`.

    One kernel for all experts; in fp64, which it does not have, one product each.
    """
    if x_MD.dtype is not torch.float64:
        return F.grouped_mm(x_MD, w_XFD.transpose(-2, -1), offs=ends_X)
    sizes = ends_X.diff(prepend=ends_X.new_zeros(1)).tolist()
    return torch.cat([x @ w.T for x, w in zip(x_MD.split(sizes), w_XFD)])


class MoE(nn.Module):
    """Routed experts, and shared ones."""

    def __init__(self, dim: int, args: MoEArgs):
        super().__init__()
        self.args = args
        self.router = Router(dim, args)
        self.experts = Experts(dim, args)
        self.shared_experts = FeedForward(dim, args.n_shared * args.hidden_dim) if args.n_shared else None
        self.loss_scale: Tensor | float = 1.0  # of the balance loss: one over the labels of the step
        self.sum_over_row = lambda loads: loads  # where ranks hold parts of a row: adds what they have

    def balanced_by_loss(self, weights: Tensor, chosen_BSC: Tensor, scores_BSX: Tensor) -> Tensor:
        """`weights`, whose backward also gives the scores the gradient of the balance loss (arXiv 2412.19437, eq. 17 to 20).

        It is summed over tokens, as every loss here: each row's counts as often as the row has tokens.
        """
        loads_BX = scores_BSX.new_zeros(len(scores_BSX), self.args.n_experts)
        loads_BX = loads_BX.scatter_add(1, chosen_BSC.flatten(1), torch.ones_like(chosen_BSC.flatten(1), dtype=loads_BX.dtype))
        loads_BX = self.sum_over_row(loads_BX)
        relative_BX = loads_BX * self.args.n_experts / loads_BX.sum(-1, keepdim=True)  # 1 where loads are even
        loss = self.args.balance_loss * (relative_BX[:, None] * scores_BSX).sum()
        return _WithLoss.apply(weights, loss * self.loss_scale)

    def sorted_rows(self, chosen_BSC: Tensor, weights_BSC: Tensor) -> tuple[Tensor, Tensor]:
        """(the choices that are served, by expert [M] int64, how many of them each expert has [X] int64)."""
        expert_of_row = chosen_BSC.flatten()
        counts = torch.zeros(self.args.n_experts, dtype=torch.int64, device=expert_of_row.device)
        counts = counts.scatter_add(0, expert_of_row, torch.ones_like(expert_of_row))
        if self.args.capacity_factor is None:
            return expert_of_row.argsort(stable=True), counts
        capacity = math.ceil(self.args.capacity_factor * len(expert_of_row) / self.args.n_experts)
        order = weights_BSC.detach().flatten().argsort(stable=True, descending=True)
        order = order[expert_of_row[order].argsort(stable=True)]
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert_of_row[order]]
        return order[place < capacity], counts.clamp(max=capacity)

    def forward(self, x_BSD: Tensor) -> Tensor:
        chosen, weights, scores = self.router(x_BSD)
        if self.args.balance_loss and torch.is_grad_enabled():
            weights = self.balanced_by_loss(weights, chosen, scores)
        out_BSD = self.routed(x_BSD, chosen, weights)
        return out_BSD if self.shared_experts is None else out_BSD + self.shared_experts(x_BSD)

    def routed(self, x_BSD: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """What each token's experts [B, S, C] make of it, summed with the weights of its choices [B, S, C]."""
        order, counts = self.sorted_rows(chosen, weights)
        out_MD = self.experts(x_BSD.flatten(0, 1)[order // self.args.top_k], counts)
        # Each token's rows side by side again: their order of addition is that of its choices, under every layout.
        if self.args.capacity_factor is None:
            rows = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
            out_MD = out_MD[rows]
        else:
            out_MD = out_MD.new_zeros(chosen.numel(), out_MD.shape[-1]).index_copy(0, order, out_MD)
        out_BSCD = out_MD.view(*chosen.shape, -1)
        return (out_BSCD * weights[..., None].to(out_BSCD.dtype)).sum(-2)


class _WithLoss(torch.autograd.Function):
    """Hands a tensor on, and adds to the step's loss: a pipeline stage has no other way to."""

    @staticmethod
    def forward(ctx, tensor: Tensor, loss: Tensor) -> Tensor:
        ctx.like = loss
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient, torch.ones_like(ctx.like)
