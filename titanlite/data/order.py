"""The order of documents, a pure function of (seed, epoch, index)."""

FEISTEL_ROUNDS = 6  # 3 suffice for large halves (Luby and Rackoff, 1988); 2 bits need 6 to pass for random


def shuffled_index(i: int, n: int, *, seed: int, epoch: int) -> int:
    """The i-th of range(n) in the order of `epoch`, in constant memory and time.

    A Feistel network is a bijection of range(4**k); walking on until the result is below n makes it one of range(n)
    (Black and Rogaway, 2002). 4**k is the next power with k >= 2, so for a large n fewer than 4 walks are expected.
    """
    key = _mix(_mix(seed) + epoch)
    bits = max(2, ((n - 1).bit_length() + 1) // 2)
    mask = (1 << bits) - 1
    while True:
        left, right = i >> bits, i & mask
        for r in range(FEISTEL_ROUNDS):
            left, right = right, left ^ _mix(key + (r << 40) + right) & mask
        i = left << bits | right
        if i < n:
            return i


def _mix(x: int) -> int:
    """A 64-bit hash: splitmix64's finalizer (Steele, Lea and Flood, 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
    x = (x ^ x >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
    return x ^ x >> 31
