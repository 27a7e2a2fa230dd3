import pytest

from titanlite.data.order import shuffled_index


def order(n, seed=0, epoch=0):
    return [shuffled_index(i, n, seed=seed, epoch=epoch) for i in range(n)]


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 15, 16, 17, 100, 1023, 1025, 5000])
def test_the_order_of_an_epoch_holds_every_index_once(n):
    assert sorted(order(n, seed=3, epoch=1)) == list(range(n))


def test_the_order_never_changes_between_versions():
    """A resumed run must go on in the order it began with."""
    assert order(10) == [8, 9, 5, 4, 1, 0, 6, 7, 2, 3]
    assert shuffled_index(123_456_789, 10**10, seed=42, epoch=7) == 5_790_387_525


def test_seeds_and_epochs_have_orders_of_their_own():
    orders = [order(100, seed, epoch) for seed in range(-1, 4) for epoch in range(5)]
    assert len(set(map(tuple, orders))) == len(orders)


def test_every_document_is_as_likely_in_every_place():
    n, seeds = 6, 3000
    places = [[0] * n for _ in range(n)]
    for seed in range(seeds):
        for place, document in enumerate(order(n, seed)):
            places[place][document] += 1
    expected = seeds / n
    chi_squared = sum((seen - expected) ** 2 / expected for row in places for seen in row)
    assert chi_squared < 53  # 25 degrees of freedom: a fair order is beyond it once in 1000 times


def test_an_order_does_not_follow_its_index():
    """The rank correlation of a shuffled list of 2000 has a standard deviation of 0.022."""
    n = 2000
    mean = (n - 1) / 2
    covariance = sum((i - mean) * (x - mean) for i, x in enumerate(order(n, seed=1)))
    variance = sum((i - mean) ** 2 for i in range(n))
    assert abs(covariance / variance) < 0.1
