"""How a decoder may be sharded, whatever it is made of."""

from titanlite.models.decoder import DecoderArgs
from titanlite.parallel.plan import ParallelPlan

ATTENTION = {
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather_input",
    "layers.*.attention.wq": "colwise",
    "layers.*.attention.wk": "colwise",
    "layers.*.attention.wv": "colwise",
    "layers.*.attention.wo": "rowwise",
}
SINKS = {"layers.*.attention.sink": "of_heads"}
# Latents are made on each rank's part of the sequence, and gathered: they are small.
LATENT_ATTENTION = {
    "layers.*.attention_norm": "norm",
    "layers.*.attention.wkv_a": "norm",
    "layers.*.attention.kv_norm": "norm",
    "layers.*.attention.wkv_b": "gather_colwise",
    "layers.*.attention.shared_key": "gather",
    "layers.*.attention.wo": "rowwise",
}
LATENT_QUERIES = {
    "layers.*.attention.wq_a": "norm",
    "layers.*.attention.q_norm": "norm",
    "layers.*.attention.wq_b": "gather_colwise",
}
LIGHTNING = {"layers.*.attention.gate": "colwise", "layers.*.attention.norm": "width_norm"}
LATENT_WHOLE_QUERIES = {"layers.*.attention.wq": "gather_colwise"}
QK_NORM = {"layers.*.attention.q_norm": "head_norm", "layers.*.attention.k_norm": "head_norm"}
FEED_FORWARD = {
    "layers.*.feed_forward": "gather_input",
    "layers.*.feed_forward.w1": "colwise",
    "layers.*.feed_forward.w3": "colwise",
    "layers.*.feed_forward.w2": "rowwise",
}
# Experts are the expert pass's. A router works on its rank's part of the sequence, so that no gradient of it is partial.
MOE = {"layers.*.moe": "local_input", "layers.*.moe.router.gate": "local_norm"}
SHARED_EXPERTS = {
    "layers.*.moe.shared_experts": "gather_input",
    "layers.*.moe.shared_experts.w1": "colwise",
    "layers.*.moe.shared_experts.w3": "colwise",
    "layers.*.moe.shared_experts.w2": "rowwise",
}


def decoder_plan(args: DecoderArgs) -> ParallelPlan:
    """The plan of the Decoder with these sizes."""
    pieces = [LATENT_ATTENTION, LATENT_QUERIES if args.latent.q_rank else LATENT_WHOLE_QUERIES] if args.latent else [ATTENTION]
    lightning = [i for i in range(args.n_layers) if args.has_lightning(i)]
    pieces += [LIGHTNING | {f"layers.{i}.attention.core": "hold_heads" for i in lightning}] if lightning else []
    pieces += [QK_NORM] if args.qk_norm else []
    pieces += [SINKS] if args.sinks else []
    pieces += [FEED_FORWARD] if not args.moe or args.n_dense_layers else []
    pieces += [MOE] if args.moe else []
    pieces += [SHARED_EXPERTS] if args.moe and args.moe.n_shared else []
    tensor = {"tok_embeddings": "embedding", "layers.*.ffn_norm": "norm", "norm": "norm", "output": "head"}
    for piece in pieces:
        tensor |= piece
    if args.residual_scale is not None:  # normed inputs go on beside the branches
        tensor |= {"layers.*.attention_norm": "local_norm", "layers.*.ffn_norm": "local_norm"}
    predicting = tuple(f"layers.{args.n_layers + k}" for k in range(args.mtp_depth))
    for block in predicting:
        tensor |= {f"{block}.{name}": "norm" for name in ("embedding_norm", "hidden_norm", "out_norm")} | {f"{block}.merge": "local_norm"}
    if predicting:
        tensor["mtp_embeddings"] = "embedding"
    return ParallelPlan(
        blocks="layers.*",
        first=("tok_embeddings",),
        last=("mtp_embeddings", "norm", "output") if predicting else ("norm", "output"),
        with_last=predicting,
        head="output",
        cores="layers.*.attention.core",
        experts="layers.*.moe.experts" if args.moe else "",
        tensor=tensor,
        heads=(args.n_heads,) if args.latent else (args.n_heads, args.n_kv_heads),
        tied=(("output.weight", "tok_embeddings.weight"), *([("mtp_embeddings.weight", "tok_embeddings.weight")] if predicting else [])),
    )
