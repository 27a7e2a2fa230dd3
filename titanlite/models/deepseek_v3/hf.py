"""The Hugging Face twins of DeepSeek-V3 and V2."""

from typing import Any

from titanlite.models.decoder import DecoderArgs
from titanlite.models.hf import REQUIRED, SIZES, HFFamily

DECODER = {name: key for name, key in SIZES.items() if name not in ("n_kv_heads", "head_dim")}
EXPERTS = {
    "n_experts": ("n_routed_experts", REQUIRED),
    "top_k": ("num_experts_per_tok", REQUIRED),
    "hidden_dim": ("moe_intermediate_size", REQUIRED),
    "n_shared": ("n_shared_experts", 0),
    "n_groups": ("n_group", 1),
    "top_groups": ("topk_group", 1),
    "scale": ("routed_scaling_factor", 1.0),
}
LATENT = {
    "q_rank": ("q_lora_rank", None),
    "kv_rank": ("kv_lora_rank", REQUIRED),
    "nope_dim": ("qk_nope_head_dim", REQUIRED),
    "rope_dim": ("qk_rope_head_dim", REQUIRED),
    "v_dim": ("v_head_dim", REQUIRED),
}
ONLY = {"attention_bias": False, "moe_layer_freq": 1}


def _written_v2(args: DecoderArgs) -> dict[str, Any]:
    return {"num_key_value_heads": args.n_heads, "topk_method": "group_limited_greedy" if args.moe.n_groups > 1 else "greedy"}


HF = (
    HFFamily(
        "deepseek_v3",
        "DeepseekV3ForCausalLM",
        DECODER | {"n_dense_layers": ("first_k_dense_replace", 3)},
        moe=EXPERTS | {"normalize": ("norm_topk_prob", True)},
        latent=LATENT,
        fixed_moe={"score": "sigmoid", "bias_speed": 0.001, "balance_loss": 0.0001},
        only=ONLY | {"rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
        also=lambda args: {"num_nextn_predict_layers": args.mtp_depth},
        written=lambda args: {"num_key_value_heads": args.n_heads},
        fits=lambda args: args.moe.score == "sigmoid",
    ),
    HFFamily(
        "deepseek_v2",
        "DeepseekV2ForCausalLM",
        DECODER | {"n_dense_layers": ("first_k_dense_replace", 0)},
        moe=EXPERTS,
        latent=LATENT,
        fixed_moe={"normalize": False, "judges": 1, "balance_loss": 0.003},
        only=ONLY | {"norm_topk_prob": False, "scoring_func": "softmax", "mlp_bias": False},
        written=_written_v2,
    ),
)
