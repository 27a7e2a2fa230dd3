"""A number for each tensor that is the same under every layout and sees what moved along any dimension.

The bytes of the last dimension are taken as 32-bit words x, padded with zeros to whole ones. With w_d odd pseudorandom weights of
the index along dimension d and h others, the fingerprint joins two sums over words mod 2^32, of x * w_0 * w_1 * ... and of
(x >> 16) * h_0 * h_1 * ... . Sums add up over shards. One flipped bit always changes them. Bits 15 and 31 of a word, the signs of
bf16 and fp32, count with 17 bits in one of the sums, so that two flipped signs cancel about once in 2^16 pairs and never by being
two; exchanged slices stay unseen if their sums are equal, or about once in 2^16 pairs at worst, where all else is equal but a sign.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

_ABSENT = -1  # the sums are not negative


def fingerprints(state: dict[str, Tensor], keys: list[str], process_group: dist.ProcessGroup | None) -> dict[str, str]:
    """Key -> fingerprint, of `keys`, which are the same on all ranks; a rank may hold some of them only. Collective.

    A plain tensor is equal on all ranks that hold its key; of a DTensor's replicas one counts.
    """
    shards, plain = torch.zeros(len(keys), 2, dtype=torch.int64), torch.full((len(keys), 2), _ABSENT)
    for i, key in enumerate(keys):
        tensor = state.get(key)
        if isinstance(tensor, DTensor):
            shards[i] = _of_shard(tensor)
        elif tensor is not None:
            plain[i] = _sums(tensor.detach(), (0,) * tensor.ndim)
    if dist.is_initialized():
        dist.all_reduce(shards, group=process_group)
        dist.all_reduce(plain, dist.ReduceOp.MAX, group=process_group)
    found = torch.where(plain == _ABSENT, shards % 2**32, plain).tolist()
    return {key: f"{words:08x}{highs:08x}" for key, (words, highs) in zip(keys, found)}


def holds_first_replica(tensor: DTensor) -> bool:
    """Whether this rank is the one, among those that hold the same shard, that counts."""
    coordinate = tensor.device_mesh.get_coordinate()
    return all(c == 0 for c, place in zip(coordinate, tensor.placements) if place.is_replicate())


def _of_shard(tensor: DTensor) -> Tensor:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    if not holds_first_replica(tensor):
        return torch.zeros(2, dtype=torch.int64)
    _, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return _sums(tensor.to_local().detach(), offset)


def _sums(local: Tensor, offset: tuple[int, ...]) -> Tensor:
    """[2] int64, each in [0, 2^32): the two sums over `local`, which begins at `offset` of the whole tensor."""
    totals = torch.zeros(2, dtype=torch.int32, device=local.device)
    if local.numel():
        words, start = _words(local, offset[-1] if offset else 0)
        sizes, starts = [*local.shape[:-1], words.shape[-1]], [*offset[:-1], start]
        weights = [_weights(dim, *place, local.device) for dim, place in enumerate(zip(starts, sizes))]
        cols = weights.pop()
        while weights and cols.shape[1] < 256:  # rows worth a reduction each
            cols = _outer(weights.pop(), cols)
        rows = torch.ones(2, 1, dtype=torch.int32, device=local.device)
        for more in weights:
            rows = _outer(rows, more)
        _add(totals, words.view(rows.shape[1], -1), rows, cols)
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


def _add(totals: Tensor, words: Tensor, rows: Tensor, cols: Tensor) -> None:
    """totals [2] += the sums over words [R, C] weighted by rows [2, R] and cols [2, C], by blocks that stay in cache."""
    block = 2**24 if words.is_cuda else 2**18
    width = min(block, words.shape[1])
    height = block // width
    for left in range(0, words.shape[1], width):
        for top in range(0, len(words), height):
            part = words[top : top + height, left : left + width]
            for i, x in enumerate((part, part >> 16)):
                of_rows = (x * cols[i, left : left + width]).sum(-1, dtype=torch.int32)  # to int64 it would be 20 times slower
                totals[i] += (of_rows * rows[i, top : top + height]).sum(dtype=torch.int32)


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
