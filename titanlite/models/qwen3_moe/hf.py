"""The Hugging Face twin of Qwen3 with experts."""

from titanlite.models.hf import BIASES, FULL_ATTENTION, REQUIRED, SIZES, HFFamily

HF = (
    HFFamily(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        SIZES | BIASES,
        moe={
            "n_experts": ("num_experts", REQUIRED),
            "top_k": ("num_experts_per_tok", REQUIRED),
            "hidden_dim": ("moe_intermediate_size", REQUIRED),
            "normalize": ("norm_topk_prob", False),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        fixed={"qk_norm": True},
        only=FULL_ATTENTION | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    ),
)
