"""Random numbers without a state: against SplitMix64 in whole numbers of Python, and as chance should look."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from scipy.stats import kstest
from torch import Tensor

from intertwine.zoo.randomness import Purpose, drawn, keyed, mixed, orders, uniform

WORD = 2**64 - 1
GOLDEN = 0x9E3779B97F4A7C15


def plain_mixed(x: int) -> int:
    """The finaliser of SplitMix64, on whole numbers without a limit."""
    x &= WORD
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


def plain_keyed(key: int, *words: int) -> int:
    for word in words:
        key = plain_mixed(((key & WORD) ^ plain_mixed(word + GOLDEN)) + GOLDEN)
    return key


def unsigned(keys: Tensor) -> list[int]:
    return [key & WORD for key in keys.flatten().tolist()]


SOME = [0, 1, 2, 3, 255, 2**31, 2**32 - 1, 2**53, 2**63 - 1, -1, -2, -(2**63), 1234567890123456789]


def test_the_numbers_are_those_of_splitmix64() -> None:
    assert unsigned(mixed(torch.tensor(SOME))) == [plain_mixed(x) for x in SOME]


def test_the_published_sequence() -> None:
    """The first numbers of SplitMix64 from the state 1234567, as its authors' C code prints them."""
    states = torch.tensor([(1234567 + i * GOLDEN) & WORD for i in (1, 2, 3)], dtype=torch.uint64).view(torch.int64)
    assert unsigned(mixed(states)) == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("words", [(0,), (7,), (-1,), (0, 0), (3, 10), (10, 3), (2**62, 5, 1)])
def test_words_are_taken_in_one_after_another(words: tuple[int, ...]) -> None:
    assert unsigned(keyed(torch.tensor(SOME), *words)) == [plain_keyed(x, *words) for x in SOME]


def test_a_word_may_differ_from_key_to_key() -> None:
    keys, words = torch.tensor([5, 6])[:, None], torch.tensor([1, 2, 3])
    assert unsigned(keyed(keys, words)) == [plain_keyed(k, w) for k in (5, 6) for w in (1, 2, 3)]


def test_uniform_keeps_the_upper_53_bits() -> None:
    keys = torch.tensor([*SOME, 2**11 - 1, 2**11])
    assert uniform(keys).tolist() == [((key & WORD) >> 11) / 2**53 for key in keys.tolist()]
    assert float(uniform(torch.tensor([-1]))) == 1 - 2**-53  # below one
    assert uniform(keys).dtype == torch.float64


def test_numbers_of_an_epoch() -> None:
    numbers = drawn(torch.tensor([4, 9]), 3, Purpose.FLIP, 5)
    assert numbers.shape == (2, 5)
    expected = [plain_keyed(seed, 3, int(Purpose.FLIP), place) for seed in (4, 9) for place in range(5)]
    assert unsigned(numbers) == expected


def test_purposes_have_numbers_of_their_own() -> None:
    assert len({int(purpose) for purpose in Purpose}) == len(Purpose)


# -- chance ------------------------------------------------------------------------------------------------------------

COUNT = 20_000


def sample(seed: int, epoch: int = 0, purpose: Purpose = Purpose.FLIP) -> np.ndarray:
    return uniform(drawn(torch.tensor([seed]), epoch, purpose, COUNT))[0].numpy()


@pytest.mark.parametrize("seed", [0, 1, 2**40])
@pytest.mark.parametrize("purpose", [Purpose.SHIFT_DOWN, Purpose.DROPOUT])
def test_numbers_are_uniform(seed: int, purpose: Purpose) -> None:
    numbers = sample(seed, 2, purpose)
    assert kstest(numbers, "uniform").pvalue > 1e-3
    neighbours = np.corrcoef(numbers[:-1], numbers[1:])[0, 1]
    assert abs(neighbours) < 4 / COUNT**0.5


def test_each_bit_is_set_half_the_time() -> None:
    keys = drawn(torch.tensor([0]), 0, Purpose.ORDER, COUNT)[0]
    share = torch.stack([(keys >> bit & 1).double().mean() for bit in range(64)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / COUNT**0.5


def test_one_bit_of_the_seed_changes_half_the_bits() -> None:
    seeds = torch.arange(500)
    for bit in (0, 1, 20, 63):
        changed = keyed(seeds, 1, 2) ^ keyed(seeds ^ (1 << bit if bit < 63 else -(2**63)), 1, 2)
        flips = torch.stack([changed >> i & 1 for i in range(64)]).double().mean()
        assert abs(float(flips) - 0.5) < 0.02


def test_seeds_epochs_and_purposes_are_independent() -> None:
    """Neighbours of every kind, also those whose words are the same in another order."""
    streams = [sample(seed) for seed in range(8)] + [sample(0, epoch) for epoch in range(1, 9)]
    streams += [sample(0, 0, purpose) for purpose in Purpose if purpose != Purpose.FLIP]
    streams += [sample(0, int(Purpose.MIX), Purpose.SHIFT_RIGHT)]
    correlations = np.corrcoef(streams) - np.eye(len(streams))
    assert np.abs(correlations).max() < 5 / COUNT**0.5


# -- orders ------------------------------------------------------------------------------------------------------------


def test_orders_are_permutations() -> None:
    found = orders(torch.tensor([0, 1, 2]), 5, 100)
    assert torch.equal(found.sort(dim=1).values, torch.arange(100).expand(3, 100))


def test_an_order_sorts_the_numbers_of_its_seed() -> None:
    keys = drawn(torch.tensor([6]), 1, Purpose.ORDER, 50)[0].tolist()
    assert orders(torch.tensor([6]), 1, 50)[0].tolist() == sorted(range(50), key=lambda place: keys[place])


def test_an_order_does_not_depend_on_who_is_beside() -> None:
    together = orders(torch.tensor([1, 3, 2**50]), 4, 64)
    for row, seed in zip(together, (1, 3, 2**50), strict=True):
        assert torch.equal(orders(torch.tensor([seed]), 4, 64)[0], row)
    keys = drawn(torch.tensor([1, 3]), 2, Purpose.MIX_KIND, 7)
    assert torch.equal(drawn(torch.tensor([3]), 2, Purpose.MIX_KIND, 7)[0], keys[1])
    assert torch.equal(drawn(torch.tensor([3]), 2, Purpose.MIX_KIND, 3)[0], keys[1, :3])  # nor on how many follow


def test_drawing_leaves_nothing_behind() -> None:
    first = orders(torch.tensor([1]), 0, 30)
    torch.manual_seed(99)
    assert torch.equal(orders(torch.tensor([1]), 0, 30), first)
    state = torch.get_rng_state()
    orders(torch.tensor([1]), 1, 30)
    assert torch.equal(torch.get_rng_state(), state)


def test_orders_differ_between_seeds_and_epochs() -> None:
    found = [row for epoch in range(4) for row in orders(torch.arange(5), epoch, 200)]
    agree = [float((a == b).double().mean()) for i, a in enumerate(found) for b in found[:i]]
    assert max(agree) < 0.05  # one place in 200 by chance


def test_every_place_is_taken_by_every_sample() -> None:
    """Over many seeds, each sample comes first, last and anywhere else equally often."""
    found = orders(torch.arange(6000), 0, 6)
    counts = torch.stack([(found == sample).sum(0) for sample in range(6)]).double()
    assert (counts - 1000).abs().max() < 5 * (6000 * 1 / 6 * 5 / 6) ** 0.5
    follows = torch.zeros(6, 6)
    for a, b in pairwise(range(6)):
        follows.index_put_((found[:, a], found[:, b]), torch.ones(6000), accumulate=True)
    assert (follows[~torch.eye(6, dtype=torch.bool)] - 1000).abs().max() < 200
