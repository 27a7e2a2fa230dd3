"""Expert parallel's exchange by DeepEP (github.com/deepseek-ai/DeepEP, its V2 interface): a token goes once to each rank of its experts.

An extra that is imported when asked for. It needs CUDA devices, and was not run on any: tests put a stand-in over gloo in its place.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Exchange:
    """Sends tokens to the ranks of a group and sums what comes back; `build(n_tokens, width, top_k)` makes a DeepEP buffer."""

    def __init__(self, n_experts: int, n_local: int, build: Callable[[int, int, int], object]):
        self.n_experts, self.n_local, self.build = n_experts, n_local, build
        self.buffer, self.room = None, 0

    def dispatch(self, x_ND: Tensor, chosen_NC: Tensor, weights_NC: Tensor) -> tuple[Tensor, Tensor, Tensor, object]:
        """-> (tokens [R, D], of each choice the expert's number on this rank or -1 [R, C], its weight [R, C], how to send them back)."""
        if len(x_ND) > self.room:
            self.buffer, self.room = self.build(len(x_ND), x_ND.shape[1], chosen_NC.shape[1]), len(x_ND)
        options = {"num_experts": self.n_experts, "num_max_tokens_per_rank": self.room}
        x, chosen, weights, handle, _ = self.buffer.dispatch(x_ND, topk_idx=chosen_NC, topk_weights=weights_NC, **options)
        return x, chosen, weights, handle

    def dispatch_again(self, x_ND: Tensor, handle: object) -> Tensor:
        return self.buffer.dispatch(x_ND, handle=handle)[0]

    def combine(self, x_RD: Tensor, handle: object, weights_RC: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x, weights, _ = self.buffer.combine(x_RD, handle=handle, topk_weights=weights_RC)
        return x, weights


def build_exchange(group: torch.distributed.ProcessGroup, n_experts: int) -> Exchange:
    from deep_ep import ElasticBuffer

    def build(n_tokens: int, width: int, top_k: int) -> ElasticBuffer:
        return ElasticBuffer(group, num_max_tokens_per_rank=n_tokens, hidden=width, num_topk=top_k, use_fp8_dispatch=False)

    return Exchange(n_experts, n_experts // group.size(), build)


@torch.compiler.disable
def routed(moe: nn.Module, exchange: Exchange, x_BSD: Tensor, chosen_BSC: Tensor, weights_BSC: Tensor) -> Tensor:
    """`MoE.routed` over the ranks of the exchange: experts, and the sum of a rank's part of a token's choices, run where experts are."""
    x, chosen, weights, handle = _Dispatch.apply(exchange, x_BSD.flatten(0, 1), chosen_BSC.flatten(0, 1), weights_BSC.flatten(0, 1))
    token, choice = (chosen >= 0).nonzero(as_tuple=True)
    expert = chosen[token, choice]
    order = expert.argsort(stable=True)
    token, choice = token[order], choice[order]
    counts = torch.zeros(exchange.n_local, dtype=torch.int64, device=x.device)
    out = moe.experts(x[token], counts.scatter_add(0, expert, torch.ones_like(expert)))
    weighted = out * weights[token, choice][:, None].to(out.dtype)
    sums = torch.zeros_like(x).index_add(0, token, weighted.to(x.dtype))
    return _Combine.apply(exchange, sums, handle).view_as(x_BSD)


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, x_ND: Tensor, chosen_NC: Tensor, weights_NC: Tensor) -> tuple:
        x, chosen, weights, handle = exchange.dispatch(x_ND.contiguous(), chosen_NC, weights_NC.contiguous())
        ctx.exchange, ctx.handle = exchange, handle
        ctx.mark_non_differentiable(chosen)
        return x, chosen, weights, handle

    @staticmethod
    def backward(ctx, d_x: Tensor, d_chosen: None, d_weights: Tensor, d_handle: None) -> tuple:
        d_x, d_weights = ctx.exchange.combine(d_x.contiguous(), ctx.handle, d_weights.contiguous())
        return None, d_x, None, d_weights


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, exchange: Exchange, x_RD: Tensor, handle: object) -> Tensor:
        ctx.exchange, ctx.handle = exchange, handle
        return exchange.combine(x_RD.contiguous(), handle)[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        return None, ctx.exchange.dispatch_again(gradient.contiguous(), ctx.handle), None
