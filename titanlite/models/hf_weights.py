"""Where the values of a decoder's tensors lie in a Hugging Face folder, as data that serves both ways and any part of a tensor."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from titanlite.models.decoder import DecoderArgs

Box = tuple[list[int], list[int]]  # where a part of a tensor begins, and its sizes


@dataclass(frozen=True)
class Twin:
    """A Hugging Face tensor that holds values of one of ours, whole or a part."""

    name: str
    expert: int | None = None  # it holds this one of our first dimension only
    head: int = 0  # rows come in heads so wide
    turned: int = 0  # the first rows of each head that rotary positions turn: by halves there, in pairs here
    lane: int = 0  # it holds several of ours by turns, this the first, second ...
    lanes: int = 1  # of so many: head by head, or along the last dimension where there are no heads
    transposed: bool = False  # the last two dimensions
    fp32: bool = False  # whatever the dtype of the others

    @property
    def is_plain(self) -> bool:
        """Whether its values stand in the order of ours."""
        return not (self.head or self.transposed or self.lanes > 1)

    def shape(self, ours: list[int]) -> list[int]:
        """Its shape, where that of ours is given."""
        start = [self.expert or 0] + [0] * (len(ours) - 1) if ours else []
        return self.box(start, ours)[1]

    def box(self, start: list[int], size: list[int]) -> Box | None:
        """The part of it that holds this part of ours, in whole heads; None where it holds none of it."""
        start, size = list(start), list(size)
        if self.expert is not None:
            if not start[0] <= self.expert < start[0] + size[0]:
                return None
            start, size = start[1:], size[1:]
        if self.head:
            first = start[0] // self.head
            start[0], size[0] = first * self.head, (-(-(start[0] + size[0]) // self.head) - first) * self.head
        if self.transposed:
            start[-2:], size[-2:] = start[:-3:-1], size[:-3:-1]
        if self.lanes > 1:
            dim = 0 if self.head else -1
            start[dim], size[dim] = self.lanes * start[dim], self.lanes * size[dim]
        return start, size

    def pairs(self, ours: Tensor, theirs: Tensor, first: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of a part of ours and of the box that holds it, which correspond. Ours begins at `first`, and with a whole head."""
        if self.expert is not None:
            ours = ours[self.expert - first]
        if not self.head:
            theirs = theirs[..., self.lane :: self.lanes] if self.lanes > 1 else theirs
            yield ours, theirs.mT if self.transposed else theirs
            return
        n = self.turned
        ours = ours.unflatten(0, (-1, self.head))
        theirs = theirs.unflatten(0, (-1, self.lanes, self.head))[:, self.lane]
        if n:
            yield ours[:, :n].unflatten(1, (n // 2, 2)), theirs[:, :n].unflatten(1, (2, n // 2)).transpose(1, 2)
        yield ours[:, n:], theirs[:, n:]


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
AHEAD = {"embedding_norm": "enorm", "hidden_norm": "hnorm", "merge": "eh_proj", "out_norm": "shared_head.norm"}  # of blocks that predict further
ROTATED = {"attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm"}  # of latent attention they are in pairs there, too
PROJECTIONS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def decoder_twins(name: str, args: DecoderArgs) -> list[Twin]:
    """Of our tensor `name`; none where its family has no such tensor there, as of blocks that predict further tokens."""
    layer, module, leaf = split_name(name)
    ahead = [f"model.layers.{args.n_layers + i}." for i in range(args.mtp_depth)]
    if name == "mtp_embeddings.weight" or (layer in ahead and not args.latent):
        return []
    if module.startswith("moe.experts."):
        projection = PROJECTIONS[module.removeprefix("moe.experts.")]
        return [Twin(f"{layer}mlp.experts.{i}.{projection}.weight", expert=i) for i in range(args.moe.n_experts)]
    if module == "moe.router.expert_bias":
        return [Twin(f"{layer}mlp.gate.e_score_correction_bias", fp32=True)]
    *parents, last = module.split(".")
    if last in PROJECTIONS:
        theirs = ".".join(["mlp", *parents[1:], PROJECTIONS[last]])  # of the feed-forward layer or the shared experts
    else:
        theirs = (MODULES | AHEAD | (LATENT if args.latent else {}))[module]
    if module not in ROTATED or args.latent:
        copies = {"tok_embeddings": "embed_tokens", "output": "shared_head.head"}.get(module)  # DeepSeek's files repeat them there
        return [Twin(f"{layer}{theirs}.{leaf}"), *(Twin(f"{one}{copies}.{leaf}") for one in ahead if copies and args.latent)]
    return [Twin(f"{layer}{theirs}.{leaf}", head=args.head_width, turned=args.rotary_dim or args.head_width)]


def split_name(name: str) -> tuple[str, str, str | None]:
    """layers.3.attention.wq.weight -> ("model.layers.3.", "attention.wq", "weight")"""
    layer, module, leaf = re.fullmatch(r"(layers\.\d+\.)?(.+?)(?:\.(weight|bias))?", name).groups()
    return f"model.{layer}" if layer else "", module, leaf
