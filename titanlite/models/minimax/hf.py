"""MiniMax's Hugging Face twin."""

from collections.abc import Mapping
from typing import Any

from titanlite.models.decoder import DecoderArgs
from titanlite.models.hf import REQUIRED, SIZES, HFFamily
from titanlite.models.hf_weights import Twin, decoder_twins, split_name

LIGHTNING = {"attention.wo": "out_proj", "attention.gate": "output_gate", "attention.norm": "norm"}


def twins(name: str, args: DecoderArgs) -> list[Twin]:
    layer, module, leaf = split_name(name)
    if module.startswith("moe.experts."):
        expert = module.removeprefix("moe.experts.")
        return [Twin(f"{layer}block_sparse_moe.experts.{i}.{expert}.weight", expert=i) for i in range(args.moe.n_experts)]
    if module == "moe.router.gate":
        return [Twin(f"{layer}block_sparse_moe.gate.weight")]
    if layer and args.has_lightning(int(layer.split(".")[2])):
        if module in LIGHTNING:
            return [Twin(f"{layer}self_attn.{LIGHTNING[module]}.weight")]
        if module in (places := ("attention.wq", "attention.wk", "attention.wv")):
            return [Twin(f"{layer}self_attn.qkv_proj.weight", head=args.head_width, lane=places.index(module), lanes=3)]
    return decoder_twins(name, args)


def _derived(config: Mapping[str, Any]) -> dict[str, Any]:
    """A pattern of layers that is not regular differs from what is then written, and is refused."""
    layer_types = config.get("layer_types") or ["full_attention", "linear_attention"]
    every = layer_types.index("full_attention") + 1 if "full_attention" in layer_types else len(layer_types) + 1
    return {"full_attention_every": every}


def _written(args: DecoderArgs) -> dict[str, Any]:
    factors = {f"{branch}_{kind}_factor": scale for branch in ("full_attn", "linear_attn", "mlp") for kind, scale in (("alpha", args.residual_scale), ("beta", 1.0))}
    return factors | {"layer_types": [("full_attention", "linear_attention")[args.has_lightning(i)] for i in range(args.n_layers)]}


HF = (
    HFFamily(
        "minimax",
        "MiniMaxForCausalLM",
        {name: key for name, key in SIZES.items() if name != "hidden_dim"}
        | {"norm_eps": ("rms_norm_eps", 1e-5), "residual_scale": ("full_attn_alpha_factor", 1.0), "rotary_dim": ("rotary_dim", None)},
        moe={
            "n_experts": ("num_local_experts", REQUIRED),
            "top_k": ("num_experts_per_tok", REQUIRED),
            "hidden_dim": ("intermediate_size", REQUIRED),
            "balance_loss": ("router_aux_loss_coef", 0.001),
        },
        fixed={"hidden_dim": 0},
        only={"router_jitter_noise": 0.0, "shared_intermediate_size": 0, "sliding_window": None},
        derived=_derived,
        written=_written,
        rope_theta=1e6,
        twins=twins,
    ),
)
