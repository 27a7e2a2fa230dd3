"""DeepSeek-V3's Hugging Face twin."""

from titanlite.models.hf import REQUIRED, SIZES, HFFamily

HF = HFFamily(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    {name: key for name, key in SIZES.items() if name not in ("n_kv_heads", "head_dim")} | {"n_dense_layers": ("first_k_dense_replace", 3)},
    moe={
        "n_experts": ("n_routed_experts", REQUIRED),
        "top_k": ("num_experts_per_tok", REQUIRED),
        "hidden_dim": ("moe_intermediate_size", REQUIRED),
        "n_shared": ("n_shared_experts", 1),
        "n_groups": ("n_group", 1),
        "top_groups": ("topk_group", 1),
        "normalize": ("norm_topk_prob", True),
        "scale": ("routed_scaling_factor", 1.0),
    },
    latent={
        "q_rank": ("q_lora_rank", None),
        "kv_rank": ("kv_lora_rank", REQUIRED),
        "nope_dim": ("qk_nope_head_dim", REQUIRED),
        "rope_dim": ("qk_rope_head_dim", REQUIRED),
        "v_dim": ("v_head_dim", REQUIRED),
    },
    fixed_moe={"score": "sigmoid", "bias_speed": 0.001, "balance_loss": 0.0001},
    only={"attention_bias": False, "moe_layer_freq": 1, "rope_interleave": True, "scoring_func": "sigmoid", "topk_method": "noaux_tc"},
    also={"num_nextn_predict_layers": 0},
    written=lambda args: {"num_key_value_heads": args.n_heads},
)
