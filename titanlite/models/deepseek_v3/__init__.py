"""DeepSeek-V3 (arXiv 2412.19437): latent attention, dense blocks first, then routed and shared experts balanced by biases.

16B and 236B are DeepSeek-V2's (arXiv 2405.04434), which scores by softmax and balances by a loss.
"""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.layers import LatentArgs, YarnScaling
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(
    dim: int, n_layers: int, n_heads: int, hidden_dim: int, q_rank: int | None, moe: MoEArgs, n_dense_layers: int,
    vocab_size: int = 102400, mscale: float = 0.707,
) -> DecoderArgs:  # fmt: skip
    return DecoderArgs(
        dim, n_layers, n_heads, n_heads, hidden_dim, vocab_size, norm_eps=1e-6, rope_theta=1e4,
        rope_scaling=YarnScaling(40.0, 4096, mscale=mscale, grows=False), latent=LatentArgs(q_rank, 512, 128, 64, 128),
        moe=moe, n_dense_layers=n_dense_layers,
    )  # fmt: skip


def _experts(n_experts: int, top_k: int, hidden_dim: int, n_shared: int, n_groups: int, top_groups: int) -> MoEArgs:
    return MoEArgs(
        n_experts, top_k, hidden_dim, n_shared, score="sigmoid", scale=2.5, n_groups=n_groups, top_groups=top_groups,
        bias_speed=0.001, balance_loss=0.0001,
    )  # fmt: skip


def _experts_v2(n_experts: int, hidden_dim: int, n_groups: int, top_groups: int, scale: float) -> MoEArgs:
    return MoEArgs(
        n_experts, 6, hidden_dim, 2, normalize=False, scale=scale, n_groups=n_groups, top_groups=top_groups, judges=1, balance_loss=0.003
    )


FLAVORS = {
    "debugmodel": DecoderArgs(
        64, 4, 4, 4, 96, 257, norm_eps=1e-6, rope_theta=1e4, latent=LatentArgs(24, 16, 16, 8, 12),
        moe=_experts(8, 2, 32, 1, 4, 2), n_dense_layers=1,
    ),
    "16B": _args(2048, 27, 16, 10944, None, _experts_v2(64, 1408, 1, 1, 1.0), 1),
    "236B": _args(5120, 60, 128, 12288, 1536, _experts_v2(160, 1536, 8, 3, 16.0), 1),
    "671B": _args(7168, 61, 128, 18432, 1536, _experts(256, 8, 2048, 1, 8, 4), 3, 129280, mscale=1.0),
}  # fmt: skip
