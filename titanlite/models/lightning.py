"""Lightning attention (arXiv 2405.17381): linear attention with one decay a head, computed block by block of the sequence.

Letters as in layers.py, and: N tokens of a block.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

BLOCK = 256  # tokens that see each other directly; what lies before them they see through the state


class LightningCore(nn.Module):
    """Within each document: out_i = sum over j <= i of exp(-slope * (i - j)) (q_i . k_j) v_j.

    A submodule of its own, so that a pass may replace its forward. It works on whole rows, of any heads: `hold` says which.
    """

    def __init__(self, n_heads: int, layer: int, n_layers: int):
        super().__init__()
        self.args = (n_heads, layer, n_layers)
        self.heads = range(n_heads)
        self.register_buffer("slopes", self.slopes_of_heads(), persistent=False)

    def slopes_of_heads(self) -> Tensor:
        """[heads held] fp32: ALiBi's slopes (arXiv 2108.12409), flatter in later layers (MiniMax-01, arXiv 2501.08313)."""
        n_heads, layer, n_layers = self.args
        numbers = torch.arange(self.heads.start + 1, self.heads.stop + 1, dtype=torch.float32, device="cpu")
        return 2 ** (-8 / n_heads * numbers) * (1 - layer / (n_layers - 1 + 1e-5) + 1e-5)

    def init_buffers(self, device: torch.device) -> None:
        self.slopes = self.slopes_of_heads().to(device, torch.promote_types(self.slopes.dtype, torch.float32))

    def hold(self, rank: int, size: int) -> None:
        """From now on this module has the rank-th of `size` equal parts of its heads."""
        n = len(self.heads) // size
        self.heads = self.heads[rank * n : (rank + 1) * n]
        with torch.device(self.slopes.device):
            self.slopes = self.slopes_of_heads().to(self.slopes)

    def forward(self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        """Returns [B, S, H, E]. Rows are in order, and documents one after another."""
        return self.advance(q_BSHE, k_BSHE, v_BSHE, documents, None)[0]

    def advance(
        self, q_BSHE: Tensor, k_BSHE: Tensor, v_BSHE: Tensor, documents: Tensor | None, state_BHEE: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """-> (out [B, S, H, E], the state after these tokens), where `state` is that of the document's tokens before them."""
        slope = self.slopes[:, None]
        before, outs = None if documents is None else documents[:, 0], []
        for start in range(0, q_BSHE.shape[1], BLOCK):
            q, k, v = (x[:, start : start + BLOCK].transpose(1, 2) for x in (q_BSHE, k_BSHE, v_BSHE))
            place = torch.arange(q.shape[2], device=q.device)
            apart = place[:, None] - place
            weight = torch.exp(-slope[..., None] * apart.clamp(min=0)) * (apart >= 0)
            to_query, to_end = torch.exp(-slope * (place + 1)), torch.exp(-slope * (len(place) - 1 - place))
            to_next = torch.exp(-slope * len(place))[..., None]
            if documents is not None:
                here = documents[:, start : start + BLOCK]
                last = here[:, -1]
                weight = weight * (here[:, None, :, None] == here[:, None, None, :])
                to_query = to_query * (here == before[:, None])[:, None]
                to_end = to_end * (here == last[:, None])[:, None]
                to_next = to_next * (before == last)[:, None, None, None]
                before = last
            out = (q @ k.transpose(-2, -1) * weight.type_as(q)) @ v
            if state_BHEE is not None:
                out = out + (q * to_query[..., None].type_as(q)) @ state_BHEE.type_as(q)
            outs.append(out)
            added = ((k * to_end[..., None].type_as(k)).transpose(-2, -1) @ v).to(to_next.dtype)
            state_BHEE = added if state_BHEE is None else state_BHEE * to_next + added
        return torch.cat(outs, 2).transpose(1, 2), state_BHEE


class WidthNorm(nn.Module):
    """RMSNorm (arXiv 1910.07467) over all heads together, of which a rank may hold a part."""

    def __init__(self, width: int, eps: float = 1e-6):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width))
        self.sum_over_heads = lambda squares: squares  # where ranks hold parts: adds what they have

    def forward(self, x_BSW: Tensor) -> Tensor:
        return self.normed(x_BSW, self.weight)

    def normed(self, x_BSW: Tensor, weight_W: Tensor) -> Tensor:
        x = x_BSW.to(torch.promote_types(x_BSW.dtype, torch.float32))
        mean = self.sum_over_heads(x.square().sum(-1, keepdim=True)) / self.width
        return (x * torch.rsqrt(mean + self.eps)).type_as(x_BSW) * weight_W


class LightningAttention(nn.Module):
    """As in MiniMax-01 (arXiv 2501.08313): no positions but decay, normed over all heads, then gated."""

    def __init__(self, dim: int, n_heads: int, head_dim: int, layer: int, n_layers: int):
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wk = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wv = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.gate = nn.Linear(dim, n_heads * head_dim, bias=False)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=False)
        self.norm = WidthNorm(n_heads * head_dim)
        self.core = LightningCore(n_heads, layer, n_layers)

    def forward(self, x_BSD: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        q, k, v = (F.silu(w(x_BSD)).unflatten(-1, (-1, self.head_dim)) for w in (self.wq, self.wk, self.wv))
        out = self.norm(self.core(q, k, v, positions, documents).flatten(2))
        return self.wo(out * self.gate(x_BSD).sigmoid())
