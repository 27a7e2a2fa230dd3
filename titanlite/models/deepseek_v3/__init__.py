"""DeepSeek-V3 (arXiv 2412.19437): latent attention, dense blocks first, then routed and shared experts balanced by biases."""

from titanlite.models.decoder import Decoder as Model
from titanlite.models.decoder import DecoderArgs, flops_per_token
from titanlite.models.layers import LatentArgs, YarnScaling
from titanlite.models.moe import MoEArgs
from titanlite.models.plans import decoder_plan as plan

__all__ = ["FLAVORS", "Model", "flops_per_token", "plan"]


def _args(dim: int, n_layers: int, n_heads: int, hidden_dim: int, latent: LatentArgs, moe: MoEArgs, n_dense_layers: int) -> DecoderArgs:
    return DecoderArgs(
        dim, n_layers, n_heads, n_heads, hidden_dim, 129280, norm_eps=1e-6, rope_theta=1e4,
        rope_scaling=YarnScaling(40.0, 4096, grows=False), latent=latent, moe=moe, n_dense_layers=n_dense_layers,
    )  # fmt: skip


def _experts(n_experts: int, top_k: int, hidden_dim: int, n_shared: int, n_groups: int = 1, top_groups: int = 1, scale: float = 2.5) -> MoEArgs:
    return MoEArgs(
        n_experts, top_k, hidden_dim, n_shared, score="sigmoid", scale=scale, n_groups=n_groups, top_groups=top_groups,
        bias_speed=0.001, balance_loss=0.0001,
    )  # fmt: skip


_LATENT = LatentArgs(1536, 512, 128, 64, 128)
FLAVORS = {
    "debugmodel": DecoderArgs(
        64, 4, 4, 4, 96, 257, norm_eps=1e-6, rope_theta=1e4, latent=LatentArgs(24, 16, 16, 8, 12),
        moe=_experts(8, 2, 32, 1, 4, 2), n_dense_layers=1,
    ),
    "236B": _args(5120, 60, 128, 12288, _LATENT, _experts(160, 6, 1536, 2, 8, 3, 16.0), 1),
    "671B": _args(7168, 61, 128, 18432, _LATENT, _experts(256, 8, 2048, 1, 8, 4), 3),
}  # fmt: skip
