"""Every family computes what `transformers` computes: logits and gradients of tiny random models, in fp64."""

import re

import pytest
import torch
from torch import Tensor

from titanlite.batch import Batch
from titanlite.losses import cross_entropy
from titanlite.models import FAMILIES
from titanlite.models.decoder import Decoder, DecoderArgs
from titanlite.models.layers import LatentArgs, LinearScaling, NTKScaling, RopeScaling, YarnScaling
from titanlite.models.moe import MoEArgs

SIZES = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
ARGS = {"dim": 32, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "hidden_dim": 48, "vocab_size": 61}
LLAMA3_SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
LATENT = {
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6, "num_key_value_heads": 4, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 24, "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0,
    "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "max_position_embeddings": 64,
}  # fmt: skip
V2 = {key: value for key, value in LATENT.items() if key != "num_mtp_layers"} | {"topk_method": "group_limited_greedy", "norm_topk_prob": False}
SIGMOID = MoEArgs(8, 3, 24, 2, score="sigmoid", scale=2.5, n_groups=4, top_groups=2, bias_speed=0.001)


def LONG(scaling):
    return DecoderArgs(**ARGS, rope_theta=1e4, norm_eps=1e-6, rope_scaling=scaling)


# name -> (class of transformers, its configuration, ours)
MODELS = {
    "llama": ("Llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}, DecoderArgs(**ARGS, rope_theta=10000.0, norm_eps=1e-6)),
    "llama, long": (
        "Llama",
        {"rope_parameters": LLAMA3_SCALING | {"rope_theta": 10000.0}, "max_position_embeddings": 64},
        DecoderArgs(**ARGS, rope_theta=10000.0, norm_eps=1e-6, rope_scaling=RopeScaling(factor=4.0, original_max_position=16)),
    ),
    "qwen2": (
        "Qwen2",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, qkv_bias=True),
    ),
    "qwen3": (
        "Qwen3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "head_dim": 16, "tie_word_embeddings": True},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, head_dim=16, qk_norm=True, tie_embeddings=True),
    ),
    "llama, linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}}, LONG(LinearScaling(4.0))),
    "llama, ntk": (  # theirs follows the length, 32 tokens here: 4 * 32 / 16 - (4 - 1)
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}, "max_position_embeddings": 16},
        LONG(NTKScaling(5.0)),
    ),
    "llama, yarn": ("Llama", {"rope_parameters": YARN}, LONG(YarnScaling(4.0, 16))),
    "qwen3_moe": (
        "Qwen3Moe",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rms_norm_eps": 1e-6, "head_dim": 16, "num_experts": 6,
         "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True},
        DecoderArgs(**ARGS, rope_theta=1e6, norm_eps=1e-6, head_dim=16, qk_norm=True, moe=MoEArgs(6, 2, 24)),
    ),
    "deepseek_v3": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        DecoderArgs(**ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(24, 16, 8, 4, 6), moe=SIGMOID, n_dense_layers=1),
    ),
    "deepseek_v3, long": (
        "DeepseekV3",
        LATENT | {"q_lora_rank": None, "rope_parameters": YARN | {"factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0}},
        DecoderArgs(
            **ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(None, 16, 8, 4, 6), moe=SIGMOID, n_dense_layers=1,
            rope_scaling=YarnScaling(40.0, 16, grows=False),
        ),
    ),
    "deepseek_v3, of version 2": (
        "DeepseekV2",
        V2 | {"q_lora_rank": 24, "rope_parameters": YARN | {"factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}},
        DecoderArgs(
            **ARGS, rope_theta=1e4, norm_eps=1e-6, latent=LatentArgs(24, 16, 8, 4, 6), n_dense_layers=1,
            moe=MoEArgs(8, 3, 24, 2, normalize=False, scale=2.5, n_groups=4, top_groups=2, judges=1),
            rope_scaling=YarnScaling(40.0, 16, mscale=0.707, grows=False),
        ),
    ),
    "minimax": (
        "MiniMax",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
         "intermediate_size": 24, "num_hidden_layers": 3, "block_size": 8, "router_jitter_noise": 0.0,
         "layer_types": ["linear_attention", "linear_attention", "full_attention"],
         **{f"{kind}_alpha_factor": 2.5 for kind in ("linear_attn", "full_attn", "mlp")},
         **{f"{kind}_beta_factor": 1.0 for kind in ("linear_attn", "full_attn", "mlp")}},
        DecoderArgs(
            **ARGS | {"n_layers": 3}, head_dim=16, rope_theta=1e4, norm_eps=1e-5, full_attention_every=3, residual_scale=2.5, moe=MoEArgs(6, 2, 24)
        ),
    ),
    "gpt_oss": (
        "GptOss",
        {"rope_parameters": YARN | {"truncate": False}, "head_dim": 8, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 5,
         "intermediate_size": 24, "layer_types": ["sliding_attention", "full_attention"], "max_position_embeddings": 64},
        DecoderArgs(
            **ARGS, head_dim=8, rope_theta=1e4, rope_scaling=YarnScaling(4.0, 16, truncate=False), qkv_bias=True, out_bias=True, window=5,
            sinks=True, moe=MoEArgs(6, 2, 24, bias=True, clamp=7.0),
        ),
    ),
}  # fmt: skip

NAMES = {
    r"model\.embed_tokens\.": "tok_embeddings.", r"model\.norm\.": "norm.", r"lm_head\.": "output.", r"model\.layers\.": "layers.",
    r"self_attn\.(.)_proj": r"attention.w\1", r"self_attn\.(.)_norm": r"attention.\1_norm", r"input_layernorm": "attention_norm",
    r"post_attention_layernorm": "ffn_norm", r"mlp\.gate_proj": "feed_forward.w1", r"mlp\.up_proj": "feed_forward.w3",
    r"mlp\.down_proj": "feed_forward.w2", r"mlp\.experts\.": "moe.experts.", r"mlp\.router\.": "moe.router.gate.", r"self_attn\.sinks": "attention.sink.weight", r"mlp\.shared_experts\.gate_proj": "moe.shared_experts.w1",
    r"mlp\.shared_experts\.up_proj": "moe.shared_experts.w3", r"mlp\.shared_experts\.down_proj": "moe.shared_experts.w2",
    r"mlp\.gate\.weight": "moe.router.gate.weight", r"mlp\.gate\.e_score_correction_bias": "moe.router.expert_bias",
    r"self_attn\.q_a_proj": "attention.wq_a", r"self_attn\.q_a_layernorm": "attention.q_norm", r"self_attn\.q_b_proj": "attention.wq_b",
    r"self_attn\.kv_a_proj_with_mqa": "attention.wkv_a", r"self_attn\.kv_a_layernorm": "attention.kv_norm",
    r"self_attn\.kv_b_proj": "attention.wkv_b", r"self_attn\.output_gate": "attention.gate", r"self_attn\.out_proj": "attention.wo",
    r"self_attn\.norm": "attention.norm",
}  # fmt: skip
ROTATED = re.compile(r"attention\.(w[qk]|[qk]_norm)\.")


def our_name(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = re.sub(theirs, ours, name)
    return name


def interleaved(tensor: Tensor, head_dim: int) -> Tensor:
    """transformers turns (i, i + E / 2) where we turn (2 i, 2 i + 1): the rows of each head in another order."""
    return tensor.view(-1, 2, head_dim // 2, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def converted(tensors: dict[str, Tensor], args: DecoderArgs) -> dict[str, Tensor]:
    named = {our_name(name): tensor for name, tensor in tensors.items()}
    for name in [name for name in named if name.endswith("experts.gate_up_proj_bias")]:  # gpt-oss: as columns, in turn
        up = name.removesuffix("_bias")
        named |= {name.replace("gate_up_proj_bias", b): named[name][:, i::2] for i, b in enumerate(("b1", "b3"))}
        named[name.replace("gate_up_proj_bias", "b2")] = named.pop(name.replace("gate_up", "down"))
        named[up] = torch.cat([named[up][..., i::2] for i in (0, 1)], -1).mT
        named[up.replace("gate_up", "down")] = named[up.replace("gate_up", "down")].mT
        del named[name]
    for name in [name for name in named if name.endswith("experts.gate_up_proj")]:
        w1_w3 = named.pop(name).chunk(2, 1)
        named |= {name.replace("gate_up_proj", w): t for w, t in zip(("w1", "w3"), w1_w3)}
        named[name.replace("gate_up_proj", "w2")] = named.pop(name.replace("gate_up_proj", "down_proj"))
    for name in [name for name in named if name.endswith("self_attn.qkv_proj.weight")]:  # head by head
        heads = named.pop(name).view(args.n_heads, 3, args.head_width, -1).unbind(1)
        named |= {name.replace("self_attn.qkv_proj", f"lightning.{w}"): t.flatten(0, 1) for w, t in zip(("wq", "wk", "wv"), heads)}
    named = {n: t for n, t in named.items() if not n.endswith(("slope_rate", "_decay"))}
    turned = () if args.latent else [name for name in named if ROTATED.search(name)]  # DeepSeek's weights are as ours
    return {name.replace("lightning.", "attention."): interleaved(t, args.head_width) if name in turned else t for name, t in named.items()}


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_those_of_transformers(name):
    import transformers

    kind, sizes, args = MODELS[name]
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SIZES | sizes, attn_implementation="eager", experts_implementation="eager")
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config).double()
    with torch.no_grad():
        for tensor in (*theirs.parameters(), *(b for name, b in theirs.named_buffers() if name.endswith("bias"))):
            tensor.add_(torch.randn_like(tensor), alpha=0.1)  # norms and biases at their start would hide much
    ours = Decoder(args).double()
    for module in ours.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(torch.device("cpu"))
    ours.load_state_dict(converted(theirs.state_dict(), args), strict=not args.tie_embeddings)
    tokens = torch.randint(0, 61, (3, 33))
    batch = Batch(tokens[:, :-1], tokens[:, 1:], torch.arange(32).expand(3, 32), None)
    expected = theirs(input_ids=batch.tokens).logits
    logits = ours(batch.tokens, batch.positions)
    # fp64 but for their rotary angles, which are fp32 tables.
    torch.testing.assert_close(logits, expected, rtol=0, atol=2e-5)
    cross_entropy(logits, batch).backward()
    cross_entropy(expected, batch).backward()
    gradients = converted({n: p.grad for n, p in theirs.named_parameters()}, args)
    for n, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[n], rtol=0, atol=2e-5 * gradients[n].abs().max().item(), msg=n)


def test_every_family_is_compared():
    compared = {name.split(",")[0] for name in MODELS}
    assert {package.rsplit(".", 1)[1] for package in FAMILIES.values()} == compared
