"""How Llama may be sharded."""

from titanlite.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    first=("tok_embeddings",),
    last=("norm", "output"),
    head="output",
    cores="layers.*.attention.core",
    tensor={
        "tok_embeddings": "embedding",
        "layers.*.attention_norm": "norm",
        "layers.*.attention": "gather_input",
        "layers.*.attention.wq": "colwise",
        "layers.*.attention.wk": "colwise",
        "layers.*.attention.wv": "colwise",
        "layers.*.attention.wo": "rowwise",
        "layers.*.ffn_norm": "norm",
        "layers.*.feed_forward": "gather_input",
        "layers.*.feed_forward.w1": "colwise",
        "layers.*.feed_forward.w3": "colwise",
        "layers.*.feed_forward.w2": "rowwise",
        "norm": "norm",
        "output": "head",
    },
    tied=(("output.weight", "tok_embeddings.weight"),),
)
