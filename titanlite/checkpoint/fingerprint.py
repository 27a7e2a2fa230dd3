"""A number for each tensor that is the same under every layout and sees what moved along any dimension.

The bytes of the last dimension are taken as 32-bit words x, padded with zeros to whole ones. A fingerprint joins two sums over words
mod 2^32, of x * w_0 * w_1 * ... and of (x >> 16) * h_0 * h_1 * ..., where w_d and h_d are fixed odd pseudorandom weights of the index
along dimension d. Sums add up over shards. Any one flipped bit changes them. Other damage goes unseen by chance only: once in 2^64 if
it is of whole words; once in 2^16 if it is two flipped signs, of fp32 or bf16, since a sign counts with 17 bits of one sum; once in
some 2^12 if slices are exchanged that differ by no more than two signs.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset


def fingerprints(state: dict[str, Tensor], keys: list[str], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """Key -> fingerprint, of `keys`, which are the same on all ranks; a rank may hold some of them only. Collective.

    A plain tensor is equal on all ranks that hold its key; of a DTensor's replicas one counts.
    """
    return joined({key: local_sums(state[key]) for key in keys if key in state}, keys, process_group)


def local_sums(tensor: Tensor) -> Tensor:
    """[2, 2] int64: what `joined` takes of this rank's part of a tensor. Row 0 adds up over ranks, row 1 is a plain tensor's."""
    sums = _nothing()
    if not isinstance(tensor, DTensor):
        sums[1] = _sums(tensor.detach(), (0,) * tensor.ndim)
    elif holds_first_replica(tensor):
        _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
        sums[0] = _sums(tensor.to_local().detach(), offset)
    return sums


def joined(sums: dict[str, Tensor], keys: list[str], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """`fingerprints` out of this rank's `local_sums` of those of the keys that it holds. Collective."""
    added, plain = _nothing()[:, None].repeat(1, len(keys), 1)  # each [K, 2]
    for i, key in enumerate(keys):
        if key in sums:
            added[i], plain[i] = sums[key]
    if dist.is_initialized():
        dist.all_reduce(added, group=process_group)
        dist.all_reduce(plain, dist.ReduceOp.MAX, group=process_group)
    found = torch.where(plain < 0, added % 2**32, plain).tolist()
    return {key: _hex(*sums) for key, sums in zip(keys, found)}


def fingerprint(tensor: Tensor) -> str:
    """Of a plain tensor, as this rank alone has it."""
    return _hex(*local_sums(tensor)[1].tolist())


def _hex(words: int, highs: int) -> str:
    return f"{words:08x}{highs:08x}"


def holds_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the one, among those that hold the same shard, that counts."""
    coordinate = tensor.device_mesh.get_coordinate()
    return all(c == 0 for c, place in zip(coordinate, tensor.placements) if place.is_replicate())


def _nothing() -> Tensor:
    return torch.tensor([[0, 0], [-1, -1]])


def _sums(local: Tensor, offset: tuple[int, ...]) -> Tensor:
    """[2] int64, each in [0, 2^32): the two sums over `local`, which begins at `offset` of the whole tensor."""
    if local.numel() == 0:
        return torch.zeros(2, dtype=torch.int64)
    words, start = _words(local, offset[-1] if offset else 0)
    sizes, starts = [*local.shape[:-1], words.shape[1]], [*offset[:-1], start]
    weights = [_weights(dim, *place, local.device) for dim, place in enumerate(zip(starts, sizes))]
    cols = weights.pop()
    while weights and cols.shape[1] < 256:  # a row is to be worth a reduction
        cols = _outer(weights.pop(), cols)
    rows = torch.ones(2, 1, dtype=torch.int32, device=local.device)
    for more in weights:
        rows = _outer(rows, more)
    totals = (_sums_of_rows(words.view(rows.shape[1], -1), cols) * rows).sum(1, dtype=torch.int32)
    return totals.cpu().to(torch.int64) % 2**32


def _words(local: Tensor, start: int) -> tuple[Tensor, int]:
    """([rows, n] int32, the bytes of `local`'s last dimension, which begins at element `start`; the word that they begin at)."""
    size = local.element_size()
    data = local.contiguous().flatten().view(torch.uint8).view(-1, size * (local.shape[-1] if local.ndim else 1))
    front = start * size % 4
    back = -(front + data.shape[1]) % 4
    if front or back or data.storage_offset() % 4:
        data = torch.nn.functional.pad(data, (front, back))
    return data.view(torch.int32), start * size // 4


def _sums_of_rows(words: Tensor, cols: Tensor) -> Tensor:
    """words [R, C], cols [2, C] -> [2, R] int32: the two sums of each row, by blocks that stay in cache."""
    sums = torch.zeros(2, len(words), dtype=torch.int32, device=words.device)
    block = 2**24 if words.is_cuda else 2**18
    width = min(block, words.shape[1])
    height = block // width
    memory = torch.empty(min(block, words.numel()), dtype=torch.int32, device=words.device)  # fresh pages cost more than the sums
    for left in range(0, words.shape[1], width):
        w, h = cols[:, left : left + width]
        for top in range(0, len(words), height):
            x, part = words[top : top + height, left : left + width], sums[:, top : top + height]
            products = memory[: x.numel()].view(x.shape)
            part[0] += torch.mul(x, w, out=products).sum(1, dtype=torch.int32)  # to int64 it would be 20 times slower
            part[1] += torch.bitwise_right_shift(x, 16, out=products).mul_(h).sum(1, dtype=torch.int32)
    return sums


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """[2, A], [2, B] -> [2, A * B]."""
    return (a[:, :, None] * b[:, None, :]).flatten(1)


def _weights(dim: int, start: int, n: int, device: torch.device) -> Tensor:
    """[2, n] int32, odd, for the two sums: products of one for index // 1024 and one for index % 1024, as there are fewer to make."""
    first, last = start // 1024, (start + n - 1) // 1024
    blocks = _odd_numbers(2 * dim + 1, first, last - first + 1, device)
    return _outer(blocks, _odd_numbers(2 * dim, 0, 1024, device))[:, start % 1024 :][:, :n]


def _odd_numbers(kind: int, start: int, n: int, device: torch.device) -> Tensor:
    """[2, n] int32: the halves of SplitMix64 of (kind, index)."""
    x = torch.arange(start, start + n, dtype=torch.int64, device=device) + ((kind + 1) << 40)
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        x = (x ^ (x >> shift)) * factor
    x = x ^ (x >> 31)
    return x.view(torch.int32).view(n, 2).t().contiguous() | 1
