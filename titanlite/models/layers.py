"""Layers that model families share: plain PyTorch, no distributed code.

Shape letters are logical sizes: B rows, S tokens, D model width, H heads, K key-value heads, E head width, F feed-forward width.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3.1's stretching of low rotary frequencies (Llama 3 herd of models, 2024, as in Meta's reference code)."""

    factor: float = 8.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192
    magnitude: float = 1.0

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        freqs = rope_frequencies(head_dim, theta)
        turns = self.original_max_position * freqs / (2 * math.pi)  # over the original context
        keep = ((turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)).clamp(0, 1)
        return freqs * keep + freqs / self.factor * (1 - keep)


@dataclass(frozen=True)
class LinearScaling:
    """Positions `factor` times closer together (arXiv 2306.15595)."""

    factor: float
    magnitude: float = 1.0

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        return rope_frequencies(head_dim, theta) / self.factor


@dataclass(frozen=True)
class NTKScaling:
    """Another base, so that the lowest frequency is `factor` times lower and the highest stays (as in arXiv 2309.00071, eq. 6)."""

    factor: float
    magnitude: float = 1.0

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        return rope_frequencies(head_dim, theta * self.factor ** (head_dim / (head_dim - 2)))


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (arXiv 2309.00071): low frequencies are stretched, high ones stay, queries and keys grow by `magnitude` each."""

    factor: float
    original_max_position: int
    beta_fast: float = 32.0  # turns over the original context above which a frequency stays
    beta_slow: float = 1.0  # and below which it is stretched whole
    truncate: bool = True  # these bounds to whole dimensions
    mscale: float = 1.0  # by how much of the paper's they grow
    grows: bool = True

    @property
    def magnitude(self) -> float:
        return self.attention_magnitude if self.grows else 1.0

    @property
    def attention_magnitude(self) -> float:
        return 0.1 * self.mscale * math.log(self.factor) + 1.0

    def frequencies(self, head_dim: int, theta: float) -> Tensor:
        def dim_of(turns: float) -> float:
            return head_dim * math.log(self.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = dim_of(self.beta_fast), dim_of(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        dims = torch.arange(head_dim // 2, dtype=torch.float32, device="cpu")
        stretch = ((dims - low) / max(high - low, 0.001)).clamp(0, 1)
        freqs = rope_frequencies(head_dim, theta)
        return freqs / self.factor * stretch + freqs * (1 - stretch)


Scaling = RopeScaling | LinearScaling | NTKScaling | YarnScaling


def rope_frequencies(head_dim: int, theta: float) -> Tensor:
    """[E / 2] fp32, radians a position."""
    return 1.0 / theta ** (torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim)


class Rope(nn.Module):
    """Rotary position embedding (RoFormer, arXiv 2104.09864), pairs (2i, 2i + 1) as in Llama's native weights.

    The buffer holds the frequencies only: angles are made from `positions`, so any position works and 128k tokens
    over 126 layers keep no tables. They are in fp64 where the parameters are, else in fp32.
    """

    def __init__(self, head_dim: int, theta: float, scaling: Scaling | None):
        super().__init__()
        self.args = (head_dim, theta, scaling)
        self.register_buffer("freqs", self.frequencies(), persistent=False)

    def frequencies(self) -> Tensor:
        head_dim, theta, scaling = self.args
        return scaling.frequencies(head_dim, theta) if scaling else rope_frequencies(head_dim, theta)

    def init_buffers(self, device: torch.device) -> None:
        """The values that a model built on meta lacks."""
        dtype = torch.promote_types(self.freqs.dtype, torch.float32)
        self.freqs = self.frequencies().to(device, dtype)

    def forward(self, x_BSHE: Tensor, positions_BS: Tensor) -> Tensor:
        """The first dimensions of each head turned, as many as there are frequencies for."""
        width = 2 * len(self.freqs)
        if x_BSHE.shape[-1] > width:
            return torch.cat([self(x_BSHE[..., :width], positions_BS), x_BSHE[..., width:]], -1)
        angles = positions_BS[:, :, None, None] * self.freqs
        cos, sin = angles.cos(), angles.sin()
        if (scaling := self.args[-1]) and scaling.magnitude != 1.0:
            cos, sin = cos * scaling.magnitude, sin * scaling.magnitude
        even, odd = x_BSHE.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
        return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).type_as(x_BSHE)


Places = tuple[Tensor, Tensor | None]  # positions [B, S] and documents [B, S] of tokens; see Batch


class AttentionCore(nn.Module):
    """Causal attention within each document. A submodule of its own, so that a pass may replace its forward.

    Kernel "sdpa" takes masks whole, [B, S, T] booleans; "flex" keeps blocks of them only (FlexAttention, arXiv 2412.05496).
    With a window a query sees that many tokens, its own included. With a sink it may also attend to nothing; see Sink.
    """

    def __init__(self, kernel: str = "sdpa", *, window: int | None = None, sink: bool = False):
        super().__init__()
        self.kernel, self.window, self.sink = kernel, window, sink

    def forward(
        self, q_BSHE: Tensor, k_BSKE: Tensor, v_BSKE: Tensor, positions: Tensor, documents: Tensor | None
    ) -> Tensor:
        """Returns [B, S, H, E]. A query sees the keys of its own document at its position or before."""
        if documents is not None or self.window or self.sink:
            return self.attend(q_BSHE, k_BSKE, v_BSKE, (positions, documents), (positions, documents))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BSKE, v_BSKE))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)

    def attend(self, q_BSHE: Tensor, k_BTKE: Tensor, v_BTKE: Tensor, queries: Places, keys: Places) -> Tensor:
        """The same for queries S and keys T that may be other parts of a sequence, in any order. Returns [B, S, H, E]."""
        (positions_q, documents_q), (positions_k, documents_k) = queries, keys
        T = k_BTKE.shape[1]
        if self.sink:
            k_BTKE, v_BTKE = _with_nothing(k_BTKE), F.pad(v_BTKE, (0, 0, 0, 0, 0, 1))
        q, k, v = (x.transpose(1, 2) for x in (q_BSHE, k_BTKE, v_BTKE))
        gqa = q.shape[1] != k.shape[1]
        if self.kernel == "sdpa":
            mask = positions_q[:, :, None] >= positions_k[:, None, :]
            if self.window:
                mask = mask & (positions_q[:, :, None] < positions_k[:, None, :] + self.window)
            if documents_q is not None:
                mask = mask & (documents_q[:, :, None] == documents_k[:, None, :])
            if self.sink:
                mask = F.pad(mask, (0, 1), value=True)
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None], enable_gqa=gqa).transpose(1, 2)

        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if self.sink:
            positions_k = F.pad(positions_k, (0, 1))
            documents_k = documents_k if documents_k is None else F.pad(documents_k, (0, 1))

        def visible(b: Tensor, _: Tensor, s: Tensor, t: Tensor) -> Tensor:
            seen = positions_q[b, s] >= positions_k[b, t]
            if self.window:
                seen = seen & (positions_q[b, s] < positions_k[b, t] + self.window)
            if documents_q is not None:
                seen = seen & (documents_q[b, s] == documents_k[b, t])
            return seen | (t == T) if self.sink else seen

        if q.is_cuda:  # as they are, both would make the whole mask
            create_block_mask, flex_attention = torch.compile(create_block_mask), torch.compile(flex_attention)
        blocks = create_block_mask(visible, q.shape[0], None, q.shape[2], k.shape[2], device=q.device)
        return flex_attention(q, k, v, block_mask=blocks, enable_gqa=gqa).transpose(1, 2)


SINK_DIMS = 8  # one would do; kernels want their head widths even


def _with_nothing(k_BTKE: Tensor) -> Tensor:
    """One key more, of which each query's score is what its first sink dimension holds."""
    nothing = torch.zeros_like(k_BTKE[:, :1])
    nothing[..., -SINK_DIMS] = 1.0
    return torch.cat([k_BTKE, nothing], 1)


class Sink(nn.Module):
    """A learned score of attending to nothing, one a head (gpt-oss, arXiv 2508.10925; arXiv 2309.17453).

    It travels with the queries, in dimensions more, so that whoever has a head has its sink.
    """

    def __init__(self, n_heads: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n_heads))

    def forward(self, q_BSHE: Tensor) -> Tensor:
        """[B, S, H, E + SINK_DIMS], so large that a score's scale, by the root of the new width, makes of it what it was."""
        width = q_BSHE.shape[-1]
        root = (width + SINK_DIMS) ** 0.5
        sinks = (self.weight.to(q_BSHE.dtype) * root)[:, None].expand(*q_BSHE.shape[:-1], 1)
        return torch.cat([q_BSHE * (root / width**0.5), sinks, torch.zeros_like(q_BSHE[..., : SINK_DIMS - 1])], -1)


class Attention(nn.Module):
    """Grouped-query attention (arXiv 2305.13245) with rotary positions, and queries and keys normed before if asked."""

    def __init__(
        self,
        dim: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        rope_theta: float,
        scaling: Scaling | None,
        kernel: str = "sdpa",
        *,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = False,
        rotary_dim: int | None = None,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.wq = nn.Linear(dim, n_heads * head_dim, bias=qkv_bias)
        self.wk = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wv = nn.Linear(dim, n_kv_heads * head_dim, bias=qkv_bias)
        self.wo = nn.Linear(n_heads * head_dim, dim, bias=out_bias)
        self.q_norm = self.k_norm = None
        if qk_norm_eps is not None:  # over each head
            self.q_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)
            self.k_norm = nn.RMSNorm(head_dim, eps=qk_norm_eps)
        self.rope = Rope(rotary_dim or head_dim, rope_theta, scaling)
        self.sink = Sink(n_heads) if sinks else None
        self.core = AttentionCore(kernel, window=window, sink=sinks)

    def forward(self, x_BSD: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        B, S = x_BSD.shape[:2]
        q, k, v = (w(x_BSD).view(B, S, -1, self.head_dim) for w in (self.wq, self.wk, self.wv))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = self.rope(q, positions), self.rope(k, positions)
        if self.sink is not None:
            q, k, v = self.sink(q), F.pad(k, (0, SINK_DIMS)), F.pad(v, (0, SINK_DIMS))
        out = self.core(q, k, v, positions, documents)[..., : self.head_dim]
        return self.wo(out.reshape(B, S, -1))


@dataclass(frozen=True)
class LatentArgs:
    q_rank: int | None  # width of the queries' latent; None: they have none
    kv_rank: int  # of that of keys and values
    nope_dim: int  # of a head, without positions
    rope_dim: int  # of a head, with
    v_dim: int  # of a head's value


class LatentAttention(nn.Module):
    """Multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), with DeepSeek's native names.

    Values are padded to the width of keys, so that any attention core takes them.
    """

    def __init__(self, dim: int, n_heads: int, args: LatentArgs, rope_theta: float, scaling: Scaling | None, eps: float, kernel: str):
        super().__init__()
        self.args = args
        width = args.nope_dim + args.rope_dim
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if args.q_rank is None:
            self.wq = nn.Linear(dim, n_heads * width, bias=False)
        else:
            self.wq_a = nn.Linear(dim, args.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(args.q_rank, eps=eps)
            self.wq_b = nn.Linear(args.q_rank, n_heads * width, bias=False)
        self.wkv_a = nn.Linear(dim, args.kv_rank + args.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(args.kv_rank, eps=eps)
        self.wkv_b = nn.Linear(args.kv_rank, n_heads * (args.nope_dim + args.v_dim), bias=False)
        self.wo = nn.Linear(n_heads * args.v_dim, dim, bias=False)
        self.shared_key = nn.Identity()  # one for all heads: a pass may have to bring it to where they are
        self.rope = Rope(args.rope_dim, rope_theta, scaling)
        self.core = AttentionCore(kernel)
        self.score_scale = scaling.attention_magnitude**2 if isinstance(scaling, YarnScaling) else 1.0

    def forward(self, x_BSD: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        a = self.args
        B, S = positions.shape
        q = self.wq(x_BSD) if a.q_rank is None else self.wq_b(self.q_norm(self.wq_a(x_BSD)))
        q_nope, q_rope = q.view(B, S, -1, a.nope_dim + a.rope_dim).split([a.nope_dim, a.rope_dim], -1)
        latent, k_rope = self.wkv_a(x_BSD).split([a.kv_rank, a.rope_dim], -1)
        k_nope, v = self.wkv_b(self.kv_norm(latent)).view(B, S, -1, a.nope_dim + a.v_dim).split([a.nope_dim, a.v_dim], -1)
        k_rope = self.rope(self.shared_key(k_rope).view(B, S, 1, -1), positions).expand(-1, -1, k_nope.shape[2], -1)
        q = torch.cat([q_nope, self.rope(q_rope, positions)], -1) * self.score_scale
        k = torch.cat([k_nope, k_rope], -1)
        out = self.core(q, k, F.pad(v, (0, k.shape[-1] - a.v_dim)), positions, documents)[..., : a.v_dim]
        return self.wo(out.reshape(B, S, -1))


class Embedding(nn.Embedding):
    def reset_parameters(self) -> None:
        if not self.weight.is_meta:  # there is nothing to draw, and drawing it would import the compiler: 0.7 s
            super().reset_parameters()


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202)."""

    def __init__(self, dim: int, hidden_dim: int):
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BSD)) * self.w3(x_BSD))
