"""Tokens drawn a second of CPU time by the generator, over a plain loop with a key-value cache and over transformers' `generate`.

    python benchmarks/rl_generator.py [--size 6M|smollm2|tiny] [--dtype float32|bfloat16]

full     every sample is as long as may be, prompts of one token: what a decoder costs
groups   what reinforcement does: 8 samples of each prompt of 256 tokens, whose ends come by chance so that they are a quarter as long on
         average; a batch of `generate` waits for its longest

Random weights, the same in all; temperature 1, whole vocabulary. They take turns, and ratios are medians over the rounds. CPU time of one
thread, so that whoever else uses the cores counts little.
"""

import argparse
import math
import os
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import torch  # noqa: E402
from torch import Tensor, nn  # noqa: E402

sys.path.insert(0, str(Path(__file__).parents[1]))

from titanlite.models.llama import LlamaArgs, Model  # noqa: E402
from titanlite.rl.generator import EmbeddedGenerator, Request  # noqa: E402

SIZES = {
    "6M": LlamaArgs(256, 8, 8, 4, 704, vocab_size=257),
    "smollm2": LlamaArgs(576, 30, 9, 3, 1536, vocab_size=49152, rope_theta=100000.0),
    "tiny": LlamaArgs(32, 2, 4, 2, 64, vocab_size=257),
}
END = 2
GROUP, PROMPT = 8, 256

Drawn = int  # tokens


def build(args: LlamaArgs, dtype: torch.dtype, most: int) -> tuple[nn.Module, "transformers.LlamaForCausalLM"]:  # noqa: F821
    """Ours and transformers' with the same weights; the end has a chance of 4 / most at every place (geometric lengths)."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=args.vocab_size, hidden_size=args.dim, intermediate_size=args.hidden_dim, num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads, num_key_value_heads=args.n_kv_heads, rope_theta=args.rope_theta, max_position_embeddings=4096,
        tie_word_embeddings=False, bos_token_id=None, eos_token_id=END, pad_token_id=0,
    )  # fmt: skip
    theirs = transformers.LlamaForCausalLM(config)
    chance = 4 / most
    head = nn.Linear(args.dim, args.vocab_size)
    with torch.no_grad():
        # The final norm makes |x|^2 = dim, so logits are normal with this deviation, and their exponentials' mean is known.
        deviation = 0.5
        head.weight.normal_(0, deviation / args.dim**0.5)
        head.weight[END] = 0.0
        head.bias.zero_()
        head.bias[END] = math.log(chance / (1 - chance) * (args.vocab_size - 1)) + deviation**2 / 2
    theirs.lm_head = head
    theirs = theirs.to(dtype).eval()

    ours = Model(args)
    ours.output = nn.Linear(args.dim, args.vocab_size)
    ours = ours.to(dtype).eval()
    names = {
        "embed_tokens": "tok_embeddings", "input_layernorm": "attention_norm", "post_attention_layernorm": "ffn_norm", "self_attn": "attention",
        "q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "mlp": "feed_forward", "gate_proj": "w1", "up_proj": "w3", "down_proj": "w2",
        "lm_head": "output",
    }  # fmt: skip
    state = {}
    for name, weight in theirs.state_dict().items():
        state[".".join(names.get(part, part) for part in name.removeprefix("model.").split("."))] = weight
    ours.load_state_dict(state)
    for module in ours.modules():
        if hasattr(module, "init_buffers"):
            module.init_buffers(torch.device("cpu"))
    return ours, theirs


class PlainCore(nn.Module):
    """Keys and values of a batch whose rows are all as long: what a bare loop has."""

    def __init__(self, rows: int, length: int, like: nn.Linear, head_dim: int):
        super().__init__()
        self.keys, self.values = (like.weight.new_empty(rows, length, like.out_features // head_dim, head_dim) for _ in range(2))
        self.end = 0

    def forward(self, q: Tensor, k: Tensor, v: Tensor, positions: Tensor, documents: None) -> Tensor:
        start, self.end = self.end, self.end + k.shape[1]
        self.keys[:, start : self.end], self.values[:, start : self.end] = k, v
        q, k, v = (x.transpose(1, 2) for x in (q, self.keys[:, : self.end], self.values[:, : self.end]))
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1, enable_gqa=q.shape[1] != k.shape[1])
        return out.transpose(1, 2)


@torch.inference_mode()
def plain(model: nn.Module, prompt: list[int], rows: int, most: int) -> Drawn:
    """As many tokens for each row; never more than what a bare loop needs, and log p of each as reinforcement does."""
    cores = [module.core for module in model.modules() if hasattr(module, "core")]
    for module in model.modules():
        if hasattr(module, "core"):
            module.core = PlainCore(rows, len(prompt) + most, module.wk, module.head_dim)
    tokens, start = torch.tensor([prompt] * rows), 0
    logprobs = []
    for _ in range(most):
        positions = torch.arange(start, start + tokens.shape[1]).expand(rows, -1)
        log_p = model(tokens, positions)[:, -1].float().log_softmax(-1)
        start += tokens.shape[1]
        tokens = torch.multinomial(log_p.exp(), 1)
        logprobs.append(log_p.gather(1, tokens))
    for module in (m for m in model.modules() if hasattr(m, "core")):
        module.core = cores.pop(0)
    return rows * most


def generator_over(args: LlamaArgs, ours: nn.Module, prompts: list[list[int]], rows: int, n: int, most: int, end: int) -> Drawn:
    """`n` samples of each prompt, `rows` of all of them at a time."""
    cores = [(module, module.core) for module in ours.modules() if hasattr(module, "core")]
    generator = EmbeddedGenerator(ours, end_id=end, n_slots=rows, max_length=len(prompts[0]) + most)
    requests = [Request(i, tuple(prompt), tuple(range(n)), most) for i, prompt in enumerate(prompts)]
    drawn = sum(len(s.ids) for s in generator.generate(requests, temperature=1.0, seed=random.randrange(2**31), version=0))
    for module, core in cores:
        module.core = core
    return drawn


@torch.inference_mode()
def transformers_over(theirs: nn.Module, prompts: list[list[int]], rows: int, n: int, most: int, end: int | None) -> Drawn:
    """Batches of `rows`, each as long as its longest; only what was drawn up to an end counts."""
    drawn = 0
    per_batch = max(rows // n, 1)
    for i in range(0, len(prompts), per_batch):
        ids = torch.tensor(prompts[i : i + per_batch]).repeat_interleave(n, 0)
        options = {"max_new_tokens": most, "do_sample": True, "top_k": 0, "top_p": 1.0, "temperature": 1.0, "eos_token_id": end, "pad_token_id": 0}
        out = theirs.generate(ids, attention_mask=torch.ones_like(ids), **options)[:, ids.shape[1] :]
        for row in out.tolist():
            drawn += row.index(end) + 1 if end in row else len(row)
    return drawn


def ratios(rounds: int, ways: dict[str, Callable[[], Drawn]]) -> tuple[float, dict[str, float]]:
    """(the generator's tokens a CPU second, that over each other one's): medians over the rounds."""
    found = {name: [] for name in ways}
    for name in ways:
        ways[name]()  # kernels and memory are ready then
    for _ in range(rounds):
        for name in random.sample(list(ways), len(ways)):
            began = time.process_time()
            tokens = ways[name]()
            found[name].append(tokens / (time.process_time() - began))
    ours = statistics.median(found["ours"])
    return ours, {name: statistics.median(a / b for a, b in zip(found["ours"], found[name])) for name in ways if name != "ours"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="6M")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--most", type=int, default=128, help="tokens of a sample at most")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="samples at a time, in `full`")
    parser.add_argument("--prompts", type=int, default=8, help="in `groups`; all their samples are drawn at a time")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--case", choices=("full", "groups", "both"), default="both")
    a = parser.parse_args()
    torch.set_num_threads(1)
    args = SIZES[a.size]
    ours, theirs = build(args, getattr(torch, a.dtype), a.most)
    for rows in a.rows if a.case != "groups" else []:
        prompts = [[5]]
        speed, over = ratios(a.rounds, {
            "ours": lambda: generator_over(args, ours, prompts, rows, rows, a.most, -1),
            "plain loop": lambda: plain(ours, prompts[0], rows, a.most),
            "transformers": lambda: transformers_over(theirs, prompts, rows, rows, a.most, None),
        })  # fmt: skip
        print(f"full {a.size} {a.dtype} rows={rows}: {speed:.0f} tokens a CPU second, " + ", ".join(f"over {k} {v:.3f}" for k, v in over.items()), flush=True)
    if a.case != "full":
        pick = random.Random(0)
        prompts = [[pick.randrange(3, min(args.vocab_size, 250)) for _ in range(PROMPT)] for _ in range(a.prompts)]
        rows = a.prompts * GROUP
        speed, over = ratios(a.rounds, {
            "ours": lambda: generator_over(args, ours, prompts, rows, GROUP, a.most, END),
            "transformers": lambda: transformers_over(theirs, prompts, rows, GROUP, a.most, END),
        })  # fmt: skip
        print(f"groups {a.size} {a.dtype}: {speed:.0f} tokens a CPU second, over transformers {over['transformers']:.3f} (at least 3)", flush=True)


if __name__ == "__main__":
    main()
