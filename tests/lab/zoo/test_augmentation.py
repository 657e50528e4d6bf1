"""Random numbers against SplitMix64 in Python integers, and their statistics; augmentation against a plain loop."""

from dataclasses import fields
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import beta, kstest
from torch import Tensor

from intertwine.lab.zoo.augment import BatchMaker, Draws, StackBatch, draw
from intertwine.lab.zoo.datasets.dataset import Dataset
from intertwine.lab.zoo.randomness import Purpose, drawn, keyed, mixed, orders, uniform
from intertwine.lab.zoo.recipe import Recipe

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


# -- augmentation ------------------------------------------------------------------------------------------------------

HEIGHT, WIDTH, SAMPLES, BATCH = 5, 7, 20, 8
SEEDS = torch.tensor([3, 11, 4])


def data(height: int = HEIGHT, width: int = WIDTH, samples: int = SAMPLES) -> Dataset:
    rng = np.random.default_rng(0)
    part = rng.integers(0, 256, (samples, height, width, 3), np.uint8), rng.integers(0, 4, samples)
    return Dataset.of("noise", part, part, [100.5, 20.25, 130], [50, 60.5, 70], list("abcd"))


def how(**changes: Any) -> Recipe:
    return Recipe("own", "sgd", 0.1, epochs=4, batch=BATCH, **changes)


def batches(recipe: Recipe, epoch: int = 1, dtype: torch.dtype = torch.float64) -> tuple[Draws, list[StackBatch]]:
    maker, draws = BatchMaker(recipe, data(), dtype), draw(recipe, SEEDS, epoch, SAMPLES)
    starts = range(0, SAMPLES, BATCH)
    return draws, [maker(draws, slice(s, min(s + BATCH, SAMPLES)), slice(i, i + 1)) for i, s in enumerate(starts)]


def numbers(seed: int, purpose: Purpose, count: int, epoch: int = 1) -> list[float]:
    return uniform(drawn(torch.tensor([seed]), epoch, purpose, count))[0].tolist()


def plain_inputs(recipe: Recipe, seed: int, epoch: int = 1) -> np.ndarray:
    """The images of an epoch in their order, pixel by pixel: mirrored, then moved, what comes in filled."""
    source, order = data(), orders(torch.tensor([seed]), epoch, SAMPLES)[0].tolist()
    mean, std, reach = np.array(source.mean), np.array(source.std), recipe.shift or recipe.crop
    draws = [numbers(seed, p, SAMPLES, epoch) for p in (Purpose.SHIFT_DOWN, Purpose.SHIFT_RIGHT, Purpose.FLIP)]
    result = np.zeros((SAMPLES, 3, HEIGHT, WIDTH))
    for place, which in enumerate(order):
        image = source.images[which].numpy().astype(float)
        if recipe.flip and draws[2][place] < 0.5:
            image = image[:, ::-1]
        down, right = (int(d[place] * (2 * reach + 1)) - reach for d in draws[:2])
        for row in range(HEIGHT):
            for column in range(WIDTH):
                i, j = row - down, column - right
                held = 0 <= i < HEIGHT and 0 <= j < WIDTH
                pixel = image[i, j] if held else (mean if recipe.shift else np.zeros(3))
                result[place, :, row, column] = (pixel - mean) / std
    return result


# -- translation and mirror --------------------------------------------------------------------------------------------

MOVES = [{"shift": 2}, {"crop": 3}, {"flip": True}, {"shift": 1, "flip": True}, {"crop": 4, "flip": True}]


@pytest.mark.parametrize("changes", MOVES, ids=str)
def test_images_against_a_plain_loop(changes: dict[str, Any]) -> None:
    recipe = how(**changes)
    _, found = batches(recipe)
    for k, seed in enumerate(SEEDS.tolist()):
        inputs = torch.cat([batch.inputs[k] for batch in found])
        assert torch.allclose(inputs, torch.tensor(plain_inputs(recipe, seed)), rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("changes", [{}, *MOVES], ids=str)
def test_labels_go_with_their_images(changes: dict[str, Any]) -> None:
    draws, found = batches(how(**changes))
    labels = torch.cat([batch.labels for batch in found], 1)
    assert torch.equal(labels, data().labels[orders(SEEDS, 1, SAMPLES)])
    assert torch.equal(torch.cat([batch.partners for batch in found], 1), labels)
    assert not any(batch.share.any() for batch in found)
    assert torch.equal(draws.order.sort(1).values, torch.arange(SAMPLES).expand(3, SAMPLES))


def test_the_mean_colour_is_zero_and_black_is_not() -> None:
    """Pushed out of the picture by its whole height, nothing but the filling is left."""
    source = data()
    for changes, pixel in (({"shift": HEIGHT}, source.mean), ({"crop": HEIGHT}, (0, 0, 0))):
        recipe = how(**changes)
        draws = draw(recipe, SEEDS, 0, SAMPLES)
        draws.down.fill_(HEIGHT)
        inputs = BatchMaker(recipe, source, torch.float64)(draws, slice(0, 4), slice(0, 1)).inputs
        expected = (torch.tensor(pixel).double() - torch.tensor(source.mean).double()) / torch.tensor(source.std)
        assert torch.equal(inputs, expected[:, None, None].expand_as(inputs))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_without_augmentation_the_pixels_are_exact(dtype: torch.dtype) -> None:
    draws, found = batches(how(), dtype=dtype)
    source = data()
    for k in range(len(SEEDS)):
        inputs = torch.cat([batch.inputs[k] for batch in found])
        assert inputs.dtype == dtype
        assert torch.equal(inputs, source.inputs(source.images[draws.order[k]], dtype))


def test_the_translations_are_equally_frequent() -> None:
    for changes in ({"shift": 2}, {"crop": 2}):
        draws = draw(how(**changes), torch.arange(4), 0, 5000)
        for moves in (draws.down, draws.right):
            assert sorted(set(moves.flatten().tolist())) == [-2, -1, 0, 1, 2]
            counts = torch.bincount(moves.flatten() + 2).double()
            assert (counts - 4000).abs().max() < 5 * (20_000 * 0.2 * 0.8) ** 0.5
        together = np.corrcoef(draws.down.flatten().double(), draws.right.flatten().double())[0, 1]
        assert abs(together) < 0.03


def test_half_of_the_images_are_mirrored() -> None:
    assert abs(float(draw(how(flip=True), torch.arange(4), 0, 5000).flip.double().mean()) - 0.5) < 0.015
    assert not draw(how(), torch.arange(4), 0, 5000).flip.any()


def test_a_network_sees_the_same_whoever_is_beside_it() -> None:
    recipe = how(shift=2, flip=True, mixup=0.3, cutmix=1.0)
    together, alone = draw(recipe, SEEDS, 2, SAMPLES), draw(recipe, SEEDS[1:2], 2, SAMPLES)
    for field in fields(Draws):
        assert torch.equal(getattr(together, field.name)[1], getattr(alone, field.name)[0])
    assert not torch.equal(together.order[0], together.order[1])
    assert not torch.equal(together.share[0], together.share[1])


def test_an_epoch_takes_over_the_memory_of_the_one_before() -> None:
    recipe = how(shift=1, flip=True, mixup=1.0)
    first, second = (draw(recipe, SEEDS, epoch, SAMPLES) for epoch in (0, 1))
    places = [getattr(first, field.name).data_ptr() for field in fields(Draws)]
    first.copy_(second)
    assert [getattr(first, field.name).data_ptr() for field in fields(Draws)] == places
    assert all(torch.equal(getattr(first, field.name), getattr(second, field.name)) for field in fields(Draws))


def test_steps_may_be_given_as_tensors() -> None:
    """As a recorded step does, which reads its number on the device."""
    recipe = how(shift=2, flip=True, mixup=0.5, cutmix=0.5)
    draws, found = batches(recipe)
    maker = BatchMaker(recipe, data(), torch.float64)
    again = maker(draws, torch.arange(BATCH, 2 * BATCH), torch.tensor([1]))
    for field in fields(StackBatch):
        assert torch.equal(getattr(again, field.name), getattr(found[1], field.name))


# -- mixtures ----------------------------------------------------------------------------------------------------------


def plain_mix(recipe: Recipe, images: np.ndarray, seed: int, step: int) -> tuple[np.ndarray, float]:
    """One batch, image by image, mixed with the batch in reverse; and how much of the partner each image holds."""
    at = [numbers(seed, p, step + 1)[step] for p in (Purpose.MIX_KIND, Purpose.MIX_SHARE)]
    down, right = (numbers(seed, p, step + 1)[step] for p in (Purpose.BOX_DOWN, Purpose.BOX_RIGHT))
    cut = recipe.cutmix > 0 and (not recipe.mixup or at[0] < 0.5)
    shape = recipe.cutmix if cut else recipe.mixup
    share = float(beta.ppf(at[1], shape, shape))
    result = images.copy()
    if not cut:
        for i, image in enumerate(images):
            result[i] = (1 - share) * image + share * images[-1 - i]
        return result, share
    rows, columns = (side_of_box(c, share, s) for c, s in ((down, HEIGHT), (right, WIDTH)))
    for i in range(len(images)):
        for row in rows:
            for column in columns:
                result[i, :, row, column] = images[-1 - i, :, row, column]
    return result, len(rows) * len(columns) / (HEIGHT * WIDTH)


def side_of_box(centre: float, share: float, size: int) -> range:
    """Rows of a box around a pixel; a square root of the share on each axis, as far as the image reaches."""
    middle, half = int(centre * size), share**0.5 * size / 2
    return range(max(0, round(middle - half)), min(size, round(middle + half)))


MIXES = [{"mixup": 0.8}, {"cutmix": 1.0}, {"mixup": 0.4, "cutmix": 1.0}, {"mixup": 0.8, "crop": 2, "flip": True}]


@pytest.mark.parametrize("changes", MIXES, ids=str)
def test_mixtures_against_a_plain_loop(changes: dict[str, Any]) -> None:
    recipe = how(**changes)
    draws, found = batches(recipe)
    if "mixup" in changes and "cutmix" in changes:
        assert set(draws.cut.flatten().tolist()) == {0, 1}  # both kinds are looked at below
    for k, seed in enumerate(SEEDS.tolist()):
        images = plain_inputs(recipe, seed)
        for step, batch in enumerate(found):
            expected, share = plain_mix(recipe, images[step * BATCH : (step + 1) * BATCH], seed, step)
            assert torch.allclose(batch.inputs[k], torch.tensor(expected), rtol=1e-12, atol=1e-12)
            assert float(batch.share[k]) == pytest.approx(share, rel=1e-12)
            assert batch.partners[k].tolist() == batch.labels[k].tolist()[::-1]


def test_a_share_is_what_was_replaced() -> None:
    """CutMix: the share of the second label is the part of the image that shows the partner, edges included."""
    recipe, source = how(cutmix=1.0), data(9, 12)
    draws = draw(recipe, torch.arange(200), 0, SAMPLES)
    batch = BatchMaker(recipe, source, torch.float64)(draws, slice(0, BATCH), slice(0, 1))
    plain = BatchMaker(how(), source, torch.float64)(draws, slice(0, BATCH), slice(0, 1)).inputs
    replaced = (batch.inputs != plain)[:, 0].any(1).double().mean((1, 2))  # three channels never all agree by chance
    assert torch.allclose(replaced, batch.share)
    assert float((batch.share - draws.share[:, 0]).abs().max()) > 0.1  # boxes do hang over the edge
    assert (batch.share <= 1).all()


def test_mixed_inputs_lie_between_the_two() -> None:
    recipe = how(mixup=1.0)
    draws, found = batches(recipe)
    plain = BatchMaker(how(), data(), torch.float64)(draws, slice(0, BATCH), slice(0, 1)).inputs
    share = draws.share[:, 0].view(-1, 1, 1, 1, 1)
    assert torch.allclose(found[0].inputs, (1 - share) * plain + share * plain.flip(1))
    assert torch.equal(found[0].share, draws.share[:, 0])


@pytest.mark.parametrize(
    ("mixup", "cutmix", "chance"), [(0.2, 0.0, 0.0), (0.0, 1.0, 1.0), (2.5, 0.0, 0.0), (0.8, 0.3, 0.5)]
)
def test_shares_are_beta_distributed(mixup: float, cutmix: float, chance: float) -> None:
    recipe = Recipe("own", "sgd", 0.1, epochs=1, batch=1, mixup=mixup, cutmix=cutmix)
    draws = draw(recipe, torch.tensor([5]), 0, 8000)
    cut, share = draws.cut.bool(), draws.share
    assert float(cut.double().mean()) == pytest.approx(chance, abs=0.03 * (chance == 0.5))
    for chosen, shape in ((cut, cutmix), (~cut, mixup)):
        if shape:
            assert kstest(share[chosen].numpy(), beta(shape, shape).cdf).pvalue > 1e-3


def test_without_mixtures_there_is_no_partner() -> None:
    draws = draw(how(), SEEDS, 0, SAMPLES)
    assert not draws.share.any()
    assert not draws.cut.any()
