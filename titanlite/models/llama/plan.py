"""How Llama may be sharded."""

from titanlite.parallel.plan import ParallelPlan

PLAN = ParallelPlan(
    blocks="layers.*",
    first=("tok_embeddings",),
    last=("norm", "output"),
    tied=(("output.weight", "tok_embeddings.weight"),),
)
