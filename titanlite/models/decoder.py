"""The decoder that families share: blocks of attention and feed-forward with a norm before each (arXiv 2302.13971)."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from titanlite.models.layers import Attention, Embedding, FeedForward, LatentArgs, LatentAttention, Scaling
from titanlite.models.lightning import BLOCK, LightningAttention
from titanlite.models.moe import MoE, MoEArgs


@dataclass(frozen=True)
class DecoderArgs:
    dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    hidden_dim: int
    vocab_size: int
    head_dim: int | None = None  # None: dim / n_heads
    norm_eps: float = 1e-5
    rope_theta: float = 500000.0
    rope_scaling: Scaling | None = None
    rotary_dim: int | None = None  # dimensions of a head that turn, its first ones; None: all
    tie_embeddings: bool = False
    attention: str = "sdpa"
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False
    window: int | None = None  # of every other block's attention, the first one's included
    sinks: bool = False
    latent: LatentArgs | None = None  # latent attention instead; n_kv_heads and head_dim are not used
    full_attention_every: int | None = None  # the last of each so many blocks; the others have lightning attention; None: all
    residual_scale: float | None = None  # what goes on beside a branch is its normed input, times this; None: its input as it is
    moe: MoEArgs | None = None
    n_dense_layers: int = 0  # the first ones, which have no experts
    mtp_depth: int = 0  # tokens beyond the next one that are predicted in training, by a block each

    @property
    def head_width(self) -> int:
        return self.head_dim or self.dim // self.n_heads

    def has_lightning(self, layer: int) -> bool:
        return bool(self.full_attention_every) and layer < self.n_layers and (layer + 1) % self.full_attention_every > 0


class Block(nn.Module):
    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__()
        if args.latent:
            self.attention = LatentAttention(
                args.dim, args.n_heads, args.latent, args.rope_theta, args.rope_scaling, args.norm_eps, args.attention
            )
        elif args.has_lightning(layer):
            self.attention = LightningAttention(args.dim, args.n_heads, args.head_width, layer, args.n_layers)
        else:
            self.attention = Attention(
                args.dim,
                args.n_heads,
                args.n_kv_heads,
                args.head_width,
                args.rope_theta,
                args.rope_scaling,
                args.attention,
                qkv_bias=args.qkv_bias,
                out_bias=args.out_bias,
                qk_norm_eps=args.norm_eps if args.qk_norm else None,
                window=args.window if layer % 2 == 0 else None,
                sinks=args.sinks,
                rotary_dim=args.rotary_dim,
            )
        self.moe = self.feed_forward = None
        if args.moe and layer >= args.n_dense_layers:
            self.moe = MoE(args.dim, args.moe)
        else:
            self.feed_forward = FeedForward(args.dim, args.hidden_dim)
        self.attention_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.ffn_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.residual_scale = args.residual_scale

    def forward(self, x_BSD: Tensor, positions: Tensor, documents: Tensor | None) -> Tensor:
        normed = self.attention_norm(x_BSD)
        x_BSD = self.beside(x_BSD, normed) + self.attention(normed, positions, documents)
        normed = self.ffn_norm(x_BSD)
        return self.beside(x_BSD, normed) + (self.feed_forward if self.moe is None else self.moe)(normed)

    def beside(self, x_BSD: Tensor, normed_BSD: Tensor) -> Tensor:
        """What a branch is added to."""
        return x_BSD if self.residual_scale is None else normed_BSD * self.residual_scale


class PredictionBlock(Block):
    """Predicts one token further than what comes before it (multi-token prediction, arXiv 2412.19437, section 2.2)."""

    def __init__(self, args: DecoderArgs, layer: int):
        super().__init__(args, layer)
        self.embedding_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.hidden_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.merge = nn.Linear(2 * args.dim, args.dim, bias=False)
        self.out_norm = nn.RMSNorm(args.dim, eps=args.norm_eps)

    def forward(self, x_BSD: Tensor, positions: Tensor, documents: Tensor | None, embedded_BSD: Tensor) -> Tensor:
        """-> hidden states for the head, and for the next of these blocks."""
        merged = self.merge(torch.cat([self.embedding_norm(embedded_BSD), self.hidden_norm(x_BSD)], -1))
        return self.out_norm(super().forward(merged, positions, documents))


class Decoder(nn.Module):
    def __init__(self, args: DecoderArgs):
        super().__init__()
        self.args = args
        self.tok_embeddings = Embedding(args.vocab_size, args.dim)
        kinds = [Block] * args.n_layers + [PredictionBlock] * args.mtp_depth
        self.layers = nn.ModuleDict({str(i): kind(args, i) for i, kind in enumerate(kinds)})
        self.mtp_embeddings = Embedding(args.vocab_size, args.dim) if args.mtp_depth else None  # the same table where the head is
        self.norm = nn.RMSNorm(args.dim, eps=args.norm_eps)
        self.output = nn.Linear(args.dim, args.vocab_size, bias=False)
        if args.tie_embeddings:
            self.output.weight = self.tok_embeddings.weight
        if args.mtp_depth:
            self.mtp_embeddings.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor, documents: Tensor | None = None, ahead: Tensor | None = None) -> Tensor:
        """tokens [B, S] (or hidden [B, S, D] where this part has no embedding) -> logits [B, S, V] (or hidden).

        With `ahead`, as in Batch, those of each token further ahead follow: [(1 + mtp_depth) * B, S, V].
        """
        x = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        predicting = []
        for block in self.layers.values():
            if isinstance(block, PredictionBlock):
                predicting.append(block)
            else:
                x = block(x, positions, documents)
        x = self.norm(x) if self.norm is not None else x
        if ahead is not None:
            outs = [x]
            for block, token in zip(predicting, ahead[..., 0].clamp(min=0).unbind(-1)):
                outs.append(block(outs[-1], positions, documents, self.mtp_embeddings(token)))
            x = torch.cat(outs)
        return self.output(x) if self.output is not None else x

    def init_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Fills one whole parameter, or one expert's part, in place; what goes in depends on its name and the generator only."""
        if "norm" in name:
            full.fill_(1.0)
        elif name.endswith((".bias", ".b1", ".b2", ".b3", "sink.weight")):
            full.zero_()
        else:
            # Logits of order one; embeddings small enough that what blocks add counts from the start.
            std = self.args.dim**-0.5 if name.endswith(("embeddings.weight", "output.weight")) else 0.02
            if name.endswith(("attention.wo.weight", "feed_forward.w2.weight", "shared_experts.w2.weight", "experts.w2")):  # what is added to the residual stream
                std /= (2 * (int(name.split(".")[1]) + 1)) ** 0.5
            nn.init.trunc_normal_(full, 0.0, std, -3 * std, 3 * std, generator=generator)


def flops_per_token(args: DecoderArgs, seq_len: int) -> int:
    """Floating-point operations a token of forward and backward together (recompute not counted).

    2 for each multiply-add, backward twice the forward, causal attention counted as the half that is computed:
    a token sees (seq_len + 1) / 2 keys on average. Lightning attention: the half of a block's keys, and the state where there are blocks.
    """
    qk_width = v_width = args.head_width
    attention = args.dim * args.head_width * (2 * args.n_heads + 2 * args.n_kv_heads)
    if args.latent:
        m = args.latent
        qk_width, v_width = m.nope_dim + m.rope_dim, m.v_dim
        queries = args.dim * args.n_heads * qk_width if m.q_rank is None else m.q_rank * (args.dim + args.n_heads * qk_width)
        keys = args.dim * (m.kv_rank + m.rope_dim) + m.kv_rank * args.n_heads * (m.nope_dim + m.v_dim)
        attention = queries + keys + args.n_heads * m.v_dim * args.dim
    feed_forward = 3 * args.dim * args.hidden_dim
    n_blocks = args.n_layers + args.mtp_depth
    n_moe = n_blocks - args.n_dense_layers if args.moe else 0
    matmuls = n_blocks * attention + (n_blocks - n_moe) * feed_forward + (1 + args.mtp_depth) * args.dim * args.vocab_size
    matmuls += args.mtp_depth * 2 * args.dim**2
    if args.moe:
        matmuls += n_moe * args.dim * (3 * args.moe.hidden_dim * (args.moe.top_k + args.moe.n_shared) + args.moe.n_experts)
    n_lightning = sum(args.has_lightning(layer) for layer in range(args.n_layers))
    matmuls += n_lightning * (5 * args.dim * args.n_heads * args.head_width - attention)
    keys = (n_blocks - n_lightning) * (seq_len + 1) / 2  # of all blocks
    if n_lightning:
        # A state is made by all tokens but the last block's, and seen by all but the first's: as dear as head_width keys.
        states = 0.0 if seq_len <= BLOCK else args.head_width * (1 - BLOCK / seq_len)
        keys += n_lightning * ((min(seq_len, BLOCK) + 1) / 2 + states)
    if args.window and args.window < seq_len:
        windowed = args.window - args.window * (args.window - 1) / (2 * seq_len)  # a row's first tokens see fewer
        keys += -(-n_blocks // 2) * (windowed - (seq_len + 1) / 2)
    return round(6 * (matmuls + args.n_heads * (qk_width + v_width) * keys))
