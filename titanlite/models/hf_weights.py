"""Where the values of a decoder's tensors lie in a Hugging Face folder, as data that serves both ways and any part of a tensor."""

import re
from dataclasses import dataclass

from torch import Tensor

from titanlite.models.decoder import DecoderArgs

Box = tuple[list[int], list[int]]  # where a part of a tensor begins, and its sizes


@dataclass(frozen=True)
class Twin:
    """A Hugging Face tensor that holds values of one of ours. Neither is copied here: `here` and `there` are views that correspond."""

    name: str
    expert: int | None = None  # it holds this one of our first dimension only
    head: int = 0  # rows of heads so wide stand by halves there and in pairs here, as rotary positions turn them
    lane: int | None = None  # its last dimension holds two of ours by turns, this the first or second
    transposed: bool = False  # the last two dimensions
    fp32: bool = False  # whatever the dtype of the others

    def shape(self, ours: list[int]) -> list[int]:
        return self.box([0] * len(ours), ours)[1]

    def box(self, start: list[int], size: list[int]) -> Box | None:
        """The part of it that holds this part of ours, in whole heads; None where it holds none of it."""
        start, size = list(start), list(size)
        if self.expert is not None:
            if not start[0] <= self.expert < start[0] + size[0]:
                return None
            start, size = start[1:], size[1:]
        if self.head:
            first = start[0] // self.head * self.head
            start[0], size[0] = first, -(-(start[0] + size[0]) // self.head) * self.head - first
        if self.transposed:
            start[-2:], size[-2:] = start[:-3:-1], size[:-3:-1]
        if self.lane is not None:
            start[-1], size[-1] = 2 * start[-1], 2 * size[-1]
        return start, size

    def here(self, ours: Tensor, first: int = 0) -> Tensor:
        """`ours` begins at `first` of the first dimension, and with a whole head."""
        if self.expert is not None:
            ours = ours[self.expert - first]
        return ours.unflatten(0, (-1, self.head // 2, 2)) if self.head else ours

    def there(self, theirs: Tensor) -> Tensor:
        if self.lane is not None:
            theirs = theirs[..., self.lane :: 2]
        if self.transposed:
            theirs = theirs.mT
        return theirs.unflatten(0, (-1, 2, self.head // 2)).transpose(1, 2) if self.head else theirs


MODULES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "moe.router.gate": "mlp.gate",
}
LATENT = {
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
}
ROTATED = {"attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm"}  # of latent attention they are in pairs there, too
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def decoder_twins(name: str, args: DecoderArgs) -> list[Twin]:
    """Of our tensor `name`; none where it is tied to one that has its own."""
    layer, module, leaf = split_name(name)
    if module.startswith("moe.experts."):
        projection = PROJECTIONS[module.removeprefix("moe.experts.")]
        return [Twin(f"{layer}mlp.experts.{i}.{projection}.weight", expert=i) for i in range(args.moe.n_experts)]
    if module == "moe.router.expert_bias":
        return [Twin(f"{layer}mlp.gate.e_score_correction_bias", fp32=True)]
    *parents, last = module.split(".")
    if last in PROJECTIONS:
        theirs = ".".join(["mlp", *parents[1:], PROJECTIONS[last]])  # of the feed-forward layer or the shared experts
    else:
        theirs = (MODULES | (LATENT if args.latent else {}))[module]
    return [Twin(f"{layer}{theirs}.{leaf}", head=args.head_width if module in ROTATED and not args.latent else 0)]


def split_name(name: str) -> tuple[str, str, str | None]:
    """layers.3.attention.wq.weight -> ("model.layers.3.", "attention.wq", "weight")"""
    layer, module, leaf = re.fullmatch(r"(layers\.\d+\.)?(.+?)(?:\.(weight|bias))?", name).groups()
    return f"model.{layer}" if layer else "", module, leaf
