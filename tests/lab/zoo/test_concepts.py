"""The data set of concepts: pixel labels, classes and errors."""

import numpy as np
import pytest
import torch

from intertwine.errors import InputError
from intertwine.lab.zoo.datasets.concepts import CATEGORIES, COLOURS, NAMES, VOCABULARY, ConceptImages, concept_images

pytestmark = pytest.mark.usefixtures("one_thread")


def masks(found: ConceptImages) -> dict[str, np.ndarray]:
    """Concept → mask of every picture."""
    every = torch.cat(list(found.concepts.batches)).numpy()
    return {name: every[:, i] for i, name in enumerate(NAMES)}


def test_the_same_seed_draws_the_same_pictures() -> None:
    few, more, other = concept_images(5, seed=3), concept_images(9, seed=3), concept_images(5, seed=4)
    assert torch.equal(few.images, more.images[:5])
    assert torch.equal(few.maps, more.maps[:5])
    assert torch.equal(few.labels, more.labels[:5])
    assert not torch.equal(few.images, other.images)


def test_000_g49_every_concept_occurs_and_categories_agree() -> None:
    found = masks(concept_images(300))
    assert set(CATEGORIES) == {"colour", "texture", "shape", "part"}
    for name in NAMES:
        assert 0.002 < found[name].mean() < 0.1, name
    things = [np.stack([found[name] for name in VOCABULARY[kind]]) for kind in ("colour", "texture", "shape")]
    for kind in things:
        assert kind.sum(0).max() == 1  # a pixel has one colour, one texture, one shape
        np.testing.assert_array_equal(kind.any(0), things[0].any(0))
    parts = found["hole"] | found["foot"]
    assert not (parts & things[0].any(0)).any()


def test_000_g49_masks_lie_on_the_pixels_that_show_the_concept() -> None:
    some = concept_images(200)
    found, pixels = masks(some), some.images.float().numpy()
    for name, colour in COLOURS.items():
        bright = found[name] & found["plain"]
        np.testing.assert_allclose(pixels[bright].mean(0), colour, atol=12)
    assert pixels[found["hole"]].mean() > 235
    assert pixels[found["foot"]].mean() < 25
    striped = pixels.sum(-1)
    dark = np.arange(32) % 4 < 2
    rows = np.broadcast_to(dark[:, None], found["striped"].shape)
    assert striped[found["striped"] & rows].mean() < 0.6 * striped[found["striped"] & ~rows].mean()
    for shape, fullness in {"disc": np.pi / 4, "square": 1.0, "triangle": 0.5, "cross": 0.6}.items():
        full = [_fullness(mask) for mask in found[shape] if mask.sum() > 60]
        assert np.median(full) == pytest.approx(fullness, abs=0.15), shape


def _fullness(mask: np.ndarray) -> float:
    rows, columns = np.nonzero(mask)
    return mask.sum() / ((np.ptp(rows) + 1) * (np.ptp(columns) + 1))


def test_the_class_is_that_of_the_largest_thing() -> None:
    some = concept_images(150, task=("texture", "colour"))
    found = masks(some)
    assert len(some.classes) == 16
    assert some.classes[1] == "plain green"
    right = 0
    for i, label in enumerate(some.labels.tolist()):
        texture, colour = some.classes[label].split()
        area = {name: found[name][i].sum() for name in (*VOCABULARY["texture"], *VOCABULARY["colour"])}
        right += area[texture] == max(area[n] for n in VOCABULARY["texture"])
        right += area[colour] == max(area[n] for n in VOCABULARY["colour"])
    assert right > 0.9 * 300  # small things together may cover more


def test_as_a_data_set() -> None:
    found = concept_images(30)
    data = found.dataset(10)
    assert (len(data.images), len(data.test_images), len(data.classes)) == (20, 10, 16)
    torch.testing.assert_close(data.inputs(data.images), found.inputs()[:20])
    with pytest.raises(InputError, match="test must be from 1 to 29 of the pictures, but is 30"):
        found.dataset(30)


def test_bad_input_of_pictures() -> None:
    with pytest.raises(
        InputError, match="count must be at least 1 and size at least 16, but they are count=0, size=32"
    ):
        concept_images(0)
    with pytest.raises(InputError, match=r"Unknown category of a class 'color'. Did you mean 'colour"):
        concept_images(1, task=["color"])
    with pytest.raises(InputError, match="one or more different categories"):
        concept_images(1, task=["shape", "shape"])
