"""Which source a row comes from: a pure function of the row's number, exact over any window."""

import heapq
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import count
from math import lcm

from titanlite.data.order import shuffled_index
from titanlite.data.packing import STATE, Row


class Turns:
    """`turns(n)` is the source of row n: of any first N rows each source has within 2 of its share, so within 4 of any window.

    A binary tree of the sources halves the rows at each node, by rounding. Built as Huffman's (1952) it has two nodes in a row
    at most double a source's share, so that roundings add up to 0.5 * (1 + 1 + 1/2 + 1/2 + 1/4 + ...) < 2 rows.
    """

    def __init__(self, weights: Sequence[float]):
        shares = [Fraction(repr(w)) for w in weights]
        unit = lcm(*(s.denominator for s in shares))
        heap = [(int(s * unit), i, i) for i, s in enumerate(shares)]  # (weight, order, source or (left, its weight, right))
        heapq.heapify(heap)
        while len(heap) > 1:
            (left_weight, _, left), (right_weight, order, right) = heapq.heappop(heap), heapq.heappop(heap)
            heapq.heappush(heap, (left_weight + right_weight, order + len(weights), (left, left_weight, right)))
        self.total, _, self.tree = heap[0]

    def __call__(self, n: int) -> int:
        node, total = self.tree, self.total
        while not isinstance(node, int):
            left, weight, right = node
            before, after = ((2 * m * weight + total) // (2 * total) for m in (n, n + 1))
            node, n, total = (left, before, weight) if after > before else (right, n - before, total - weight)
        return node


def mixed_rows(
    streams: Sequence[Iterator[Row]], turns: Turns, row: int, n_rows: int, seed: int, start: Sequence[int]
) -> Iterator[tuple[Row | None, tuple[int, ...]]]:
    """(row, state after it) of row number `row` of each step: the states of its streams, one a source, then the number of steps.

    The rows of a step are dealt to the sources in an order of their own, so that every stream of a source gets on. The row is
    None where its stream has ended.
    """
    state = list(start)
    for step in count(start[-1]):
        turn = step * n_rows + shuffled_index(row, n_rows, seed=seed, epoch=step) if len(streams) > 1 else 0
        source = turns(turn)
        found = next(streams[source], None)
        if found is not None:
            state[source * STATE : (source + 1) * STATE] = found.after
        state[-1] = step + 1
        yield found, tuple(state)
