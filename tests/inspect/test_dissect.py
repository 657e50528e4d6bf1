"""Dissection against brute force: thresholds, overlaps, chance, rotations, Broden folders, pictures, bad input."""

import csv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from intertwine.errors import InputError, MismatchError
from intertwine.inspect.concepts import ConceptData, Labels, concept_data, read_broden
from intertwine.inspect.dissect import SHARE, DissectionSettings, Maps, TopValues, dissect
from intertwine.inspect.dissection import LEVEL, Dissection, draw_fractions
from intertwine.inspect.rotation import rotation
from intertwine.inspect.rotation_scan import ALPHAS, rotation_scan

pytestmark = pytest.mark.usefixtures("one_thread")
SIZE = (12, 12)


class Small(nn.Module):
    """Maps of 6 units at a third of the size, then nothing but numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, stride=3)
        self.relu = nn.ReLU()
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.relu(self.conv(x)).mean((2, 3)))


def network() -> Small:
    torch.manual_seed(0)
    return Small()


def scene(images: int = 40) -> tuple[Tensor, Tensor]:
    """Images, and masks of 5 concepts: three colours, two shapes; in some images no shape is labelled."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(images, 3, *SIZE, generator=g)
    colours = functional.avg_pool2d(x, 3, 1, 1) > 0.5
    shapes = torch.rand(images, 2, *SIZE, generator=g) > 0.9
    shapes[::3] = False
    return x, torch.cat([colours, shapes], 1)


NAMES, KINDS = ("red", "green", "blue", "disc", "cross"), ("colour",) * 3 + ("shape",) * 2


def data(masks: Tensor) -> ConceptData:
    return ConceptData(NAMES, KINDS, [masks[:7], masks[7:]])


def brute_force(maps: Tensor, masks: Tensor, share: float) -> tuple[np.ndarray, np.ndarray]:
    """Thresholds by numpy.quantile and overlaps pixel by pixel, one unit and concept at a time."""
    units = maps.shape[1]
    thresholds = np.array([np.quantile(maps[:, u].double().numpy(), 1 - share) for u in range(units)])
    large = functional.interpolate(maps, SIZE, mode="bilinear", align_corners=False).numpy()
    iou = np.zeros((units, masks.shape[1]))
    for kind in set(KINDS):
        same = [i for i, one in enumerate(KINDS) if one == kind]
        labelled = masks[:, same].flatten(1).any(1).numpy()
        for u in range(units):
            seen = large[labelled, u] > np.float32(thresholds[u])
            for c in same:
                there = masks[labelled, c].numpy()
                iou[u, c] = (seen & there).sum() / max(1, (seen | there).sum())
    return thresholds, iou


# -- thresholds --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.005, 0.05, 0.5, 0.999])
@pytest.mark.parametrize("batch", [1, 7, 1000])
def test_000_g49_streamed_thresholds_are_exact_quantiles(share: float, batch: int) -> None:
    values = torch.randn(4, 1000, dtype=torch.float64)
    values[1] = values[1].clamp(min=0).round(decimals=1)  # many equal values, as behind a ReLU
    top = TopValues(1000, share)
    for part in values.split(batch, dim=1):
        top.add(part)
    np.testing.assert_allclose(top.threshold().numpy(), np.quantile(values.numpy(), 1 - share, axis=1), atol=1e-12)


def test_000_g49_thresholds_keep_few_values() -> None:
    top = TopValues(100_000, 0.005)
    for part in torch.randn(2, 100_000).split(500, dim=1):
        top.add(part)
        held = [top._best, *top._waiting]
        assert sum(0 if one is None else one.shape[1] for one in held) <= 2 * 502 + 500


# -- overlaps ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.02, 0.3])
@pytest.mark.parametrize("alpha", [None, 1.0])
def test_000_g49_overlaps_are_those_of_brute_force(share: float, alpha: float | None) -> None:
    model, (x, masks) = network(), scene()
    q = None if alpha is None else rotation(6, alpha, seed=0, dtype=torch.float32)
    maps = torch.relu(model.conv(x)).detach()
    maps = (
        maps
        if q is None
        else torch.stack([torch.stack([q @ maps[n, :, :, j] for j in range(4)], -1) for n in range(40)])
    )
    found = dissect(model, "relu", x, data(masks), q, share=share, null=0)
    thresholds, iou = brute_force(maps, masks, share)
    np.testing.assert_allclose([unit.threshold for unit in found.units], thresholds, rtol=1e-5)
    np.testing.assert_allclose(found.iou.numpy(), iou, atol=1e-3 if alpha else 1e-9)
    for unit in found.units:
        assert unit.iou == pytest.approx(iou[unit.unit].max(), abs=1e-3)
        best = iou[unit.unit]
        assert unit.concept == (NAMES[best.argmax()] if best.max() else None)
    assert found.rotated is (alpha is not None)
    assert {u.unit for u in found.interpretable} == {i for i in range(6) if iou[i].max() > 0.04}


@pytest.mark.parametrize("memory", [0, 2**30])
def test_memory_and_batches_change_nothing(memory: int) -> None:
    model, (x, masks) = network(), scene()
    whole = dissect(model, "conv", x, data(masks))
    parts = dissect(model, "conv", [(x[:3], None), (x[3:33], None), (x[33:], None)], data(masks), memory=memory)
    assert parts.to_dict() == whole.to_dict()
    assert Maps(model, "conv", x, memory=memory).cached is (memory > 0)


def test_labels_of_present_concepts_only_are_the_same_as_masks() -> None:
    model, (x, masks) = network(), scene()
    sparse = [[Labels(torch.tensor([4, 0, 1, 2, 3]), one[[4, 0, 1, 2, 3]])] for one in masks]
    found = dissect(model, "relu", x, ConceptData(NAMES, KINDS, sparse), share=0.05)
    assert torch.equal(found.iou, dissect(model, "relu", x, data(masks.byte()), share=0.05).iou)


def test_channels_last_maps_are_read_by_their_layout() -> None:
    class Last(nn.Module):
        def __init__(self, model: Small) -> None:
            super().__init__()
            self.conv, self.norm = model.conv, nn.LayerNorm(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.conv(x).movedim(1, -1))

    model, (x, masks) = Last(network()), scene()
    assert Maps(model, "norm", x).units == 6
    found = dissect(model, "norm", x, data(masks), share=0.05, null=0)
    thresholds, iou = brute_force(model(x).movedim(-1, 1).detach(), masks, 0.05)
    np.testing.assert_allclose(found.iou.numpy(), iou, atol=1e-9)
    np.testing.assert_allclose([unit.threshold for unit in found.units], thresholds, rtol=1e-5)


def test_000_g49_a_pixel_at_the_threshold_is_not_above_it() -> None:
    """Maps of few whole values, as large as the masks: many pixels lie at the threshold itself."""
    torch.manual_seed(0)
    x = torch.randint(0, 3, (8, 2, *SIZE)).float()
    masks = torch.rand(8, 5, *SIZE) > 0.5
    found = dissect(nn.Sequential(nn.Identity()), "0", x, data(masks), share=0.5, null=0)
    assert [unit.threshold for unit in found.units] == [1.0, 1.0]
    for unit in range(2):
        seen = x[:, unit] > 1
        wanted = [float((seen & masks[:, c]).sum() / (seen | masks[:, c]).sum()) for c in range(5)]
        assert found.iou[unit].tolist() == pytest.approx(wanted)


def test_000_g49_a_unit_is_interpretable_above_the_level_and_not_at_it() -> None:
    """One unit, 100 pixels; its mask has 4 of the 100 pixels that either has: the level of 0.04 itself."""
    x = torch.zeros(4, 1, 5, 5)
    flat = x.flatten()
    flat[:4] = 1.0  # the unit's mask
    masks = torch.ones(4, 1, 5, 5, dtype=torch.bool)
    model = nn.Sequential(nn.Identity())
    found = dissect(model, "0", x, masks, share=0.05, null=0)
    assert found.units[0].iou == 4 / 100
    assert found.level == LEVEL == 0.04
    assert found.interpretable == ()
    assert found.to_rows()[0]["interpretable"] is False
    flat[4] = 1.0
    assert len(dissect(model, "0", x, masks, share=0.06, null=0).interpretable) == 1
    assert len(dissect(model, "0", x, masks, share=0.06, level=0.05, null=0).interpretable) == 0
    assert dissect(model, "0", x, masks, null=0).share == SHARE == 0.005


# -- chance ------------------------------------------------------------------------------------------------------------


def test_000_g49_chance_is_what_the_masks_of_other_images_give() -> None:
    model, (x, masks) = network(), scene()
    found = dissect(model, "relu", x, data(masks), share=0.05, null=3)
    assert found.null is not None
    maps = torch.relu(model.conv(x)).detach()
    for i, offset in enumerate((10, 20, 30)):
        _, iou = brute_force(maps, masks.roll(-offset, 0), 0.05)
        np.testing.assert_allclose(found.null.values[i].numpy(), iou.max(1), atol=1e-9)
    assert found.null.quantile() == pytest.approx(np.quantile(found.null.values.numpy(), 0.95))
    for level in (0.04, 0.1):
        assert found.null.above(level) == float((found.null.values.numpy() > level).mean())
    assert repr(found.null) == f"ChanceOverlaps(3 × 6 units, 95 % below {found.null.quantile():.4f})"
    bound = found.null.quantile()
    assert found.fraction_above_chance == sum(unit.iou > bound for unit in found.units) / 6


def test_000_g49_planted_units_stand_out_and_others_do_not() -> None:
    torch.manual_seed(0)
    masks = torch.zeros(200, 2, *SIZE, dtype=torch.bool)
    for n in range(200):
        row, column = torch.randint(0, 10, (2,)).tolist()
        masks[n, n % 2, row : row + 2, column : column + 2] = True
    # Units 0 and 1 see the concepts, unit 2 sees noise.
    x = torch.cat([masks + 0.1 * torch.randn(masks.shape), torch.randn(200, 1, *SIZE)], 1)
    model = nn.Sequential(nn.Identity())
    found = dissect(model, "0", x, ConceptData(("even", "odd"), ("square",) * 2, [masks]), null=2)
    assert [unit.concept for unit in found.units[:2]] == ["even", "odd"]
    assert [unit.unit for unit in found.interpretable] == sorted([0, 1], key=lambda i: -found.units[i].iou)
    assert found.null is not None
    assert found.null.quantile() < 0.04 < 0.3 < found.units[0].iou
    assert found.units[2].iou < 0.04


# -- results -----------------------------------------------------------------------------------------------------------


def example() -> Dissection:
    model, (x, masks) = network(), scene()
    return dissect(model, "relu", x, data(masks), share=0.05)


def test_summaries_rows_and_text() -> None:
    found = example()
    assert found.fraction == len(found.interpretable) / 6
    assert sum(kind.units for kind in found.by_category.values()) == len(found.interpretable)
    assert set(found.by_category) == {"colour", "shape"}
    assert sum(map(len, found.by_concept.values())) == len(found.interpretable)
    for kind, entry in found.by_category.items():
        names = {name for name in found.by_concept if KINDS[NAMES.index(name)] == kind}
        assert entry.concepts == len(names)
    rows = found.to_rows()
    assert rows[2]["unit"] == 2
    assert [row["interpretable"] for row in rows] == [unit.iou > 0.04 for unit in found.units]
    assert found.to_frame().shape == (6, 6)
    text = repr(found)
    assert f"{len(found.interpretable)} of 6 units" in text
    assert "by chance" in text
    assert "rotated" not in text


def test_000_g74_bars_per_category_and_concept() -> None:
    found = example()
    bars = [int(bar.get_height()) for bar in found.plot().axes[0].patches]  # pyrefly: ignore
    kinds = found.by_category.values()
    assert bars == [*(kind.units for kind in kinds), *(kind.concepts for kind in kinds)]
    axes = found.plot("concept").axes[0]
    assert [tick.get_text() for tick in axes.get_xticklabels()] == list(found.by_concept)
    heights = {round(bar.get_x() + 0.4): int(bar.get_height()) for bar in axes.patches}  # pyrefly: ignore
    assert heights == {i: len(units) for i, units in enumerate(found.by_concept.values())}
    with pytest.raises(InputError, match=r"Unknown by 'colour'.* Choose one of: category, concept"):
        found.plot("colour")


def test_000_g73_scan_and_its_picture() -> None:
    model, (x, masks) = network(), scene()
    scan = rotation_scan(model, "relu", x, data(masks), [0, 0.5, 1], seeds=[0, 1], share=0.05)
    assert set(scan.dissections) == {(a, s) for a in (0.0, 0.5, 1.0) for s in (0, 1)}
    assert DissectionSettings() == DissectionSettings(level=0.04, share=0.005, null=1)
    assert all(one.null is not None and len(one.null.values) == 1 for one in scan.dissections.values())
    for (alpha, seed), one in scan.dissections.items():
        alone = dissect(model, "relu", x, data(masks), rotation(6, alpha, seed), share=0.05)
        assert one.iou == pytest.approx(alone.iou, abs=1e-3)
    line = scan.plot().axes[0].lines[0]
    assert list(np.asarray(line.get_ydata())) == pytest.approx([np.mean(some) for some in scan.curve.values()])
    assert scan.to_frame().height == len(scan.to_rows()) == 6
    assert "interpretable units by α: 0:" in repr(scan)
    both = draw_fractions({"with ReLU": scan.curve, "without": scan.curve}, {"without": 0.1})
    names = [text.get_text() for text in both.legends[0].get_texts()]
    assert names == ["with ReLU", "without", "without, by chance"]


def test_a_scan_goes_from_the_basis_of_the_network_to_that_of_the_rotation_where_nothing_is_said() -> None:
    model, (x, masks) = network(), scene()
    scan = rotation_scan(model, "relu", x, data(masks), null=0)
    assert list(scan.curve) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert scan.dissections[0.0, 0].iou == pytest.approx(dissect(model, "relu", x, data(masks), null=0).iou, abs=1e-9)


# -- Broden ------------------------------------------------------------------------------------------------------------


def write(file: Path, rows: list[list[object]]) -> None:
    with file.open("w", newline="", encoding="utf-8") as lines:
        csv.writer(lines).writerows(rows)


@pytest.fixture
def broden(tmp_path: Path) -> Path:
    """Three images 8×8 with label maps 4×4: colours per pixel, an object with a part, a scene for the whole image."""
    from PIL import Image

    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.fromarray(np.full((8, 8, 3), 100 * i, np.uint8)).save(tmp_path / "images" / f"{i}.png")
        colour = np.zeros((4, 4, 3), np.uint8)
        colour[:2, :, 0], colour[2:, :, 0] = 1, 2 + i
        Image.fromarray(colour).save(tmp_path / "images" / f"{i}_color.png")
    high = np.zeros((4, 4, 3), np.uint8)
    high[0, 0] = (44, 1, 0)  # 44 + 256
    Image.fromarray(high).save(tmp_path / "images" / "0_object.png")
    write(tmp_path / "category.csv", [["name", "first"], ["color", 1], ["object", 2], ["scene", 3]])
    labels = [[1, "red"], [2, "blue"], [3, "green"], [4, "green"], [300, "lamp"], [7, "street"]]
    kinds = ["color(3)", "color(1)", "color(1)", "object(1);color(2)", "color(1);object(2)", "scene(1)"]
    write(
        tmp_path / "label.csv", [["number", "name", "category"], *([*a, b] for a, b in zip(labels, kinds, strict=True))]
    )
    write(
        tmp_path / "index.csv",
        [
            ["image", "split", "ih", "iw", "sh", "sw", "color", "object", "scene"],
            ["0.png", "train", 8, 8, 4, 4, "0_color.png", "0_object.png", "7"],
            ["1.png", "train", 8, 8, 4, 4, "1_color.png", "", ""],
            ["2.png", "val", 8, 8, 4, 4, "2_color.png", "", ""],
        ],
    )
    return tmp_path


def test_000_g49_a_broden_folder_is_read(broden: Path) -> None:
    found = read_broden(broden, batch=2, mean=(0.0, 0.0, 0.0), std=(1.0, 1.0, 1.0))
    assert found.concepts.names == ("red", "blue", "green (color 3)", "green (color 4)", "lamp", "street")
    assert found.concepts.categories == ("color", "color", "color", "color", "object", "scene")
    assert [tuple(x.shape) for x, _ in found.images] == [(2, 3, 8, 8), (1, 3, 8, 8)]
    assert next(iter(found.images))[0][1].unique().tolist() == [pytest.approx(100 / 255)]
    first, second, _ = found.concepts.images()
    there = dict(zip(first.concepts.tolist(), first.masks, strict=True))
    assert {i: int(mask.sum()) for i, mask in there.items()} == {0: 8, 1: 8, 4: 1, 5: 16}
    assert bool(there[4][0, 0])
    assert second.concepts.tolist() == [0, 2]
    assert read_broden(broden, split="val").images.samples == 1
    assert read_broden(broden, size=(16, 16)).images.size == (16, 16)
    dissection = dissect(nn.Sequential(nn.Conv2d(3, 4, 1)), "0", found.images, found.concepts, share=0.2)
    assert dissection.images == 3
    assert dissection.left_out == ()
    assert "3 images" in repr(found)


def test_a_broken_broden_folder_is_refused(broden: Path) -> None:
    with pytest.raises(InputError, match=r"The split 'test' of .* has no images; index.csv has train, val"):
        read_broden(broden, split="test")
    (broden / "images" / "1_color.png").unlink()
    with pytest.raises(InputError, match=r"1_color.png, which index.csv lists, cannot be read as an image"):
        list(read_broden(broden).concepts.images())
    write(broden / "label.csv", [["number", "name", "category"], [1, "red", "color(3)"]])
    with pytest.raises(InputError, match=r"0.png has the label 2, which label.csv does not list"):
        list(read_broden(broden).concepts.images())
    write(broden / "label.csv", [["number", "name", "category"], [1, "red", "hue(3)"]])
    with pytest.raises(InputError, match=r"the category 'hue\(3\)'; category.csv has color, object, scene"):
        read_broden(broden)
    write(broden / "label.csv", [["number", "name"]])
    with pytest.raises(InputError, match="has no column category; found number, name"):
        read_broden(broden)


# -- bad input ---------------------------------------------------------------------------------------------------------


def test_concepts_that_never_occur_are_left_out_and_named() -> None:
    model, (x, masks) = network(), scene()
    masks[:, [1, 4]] = False
    found = dissect(model, "relu", x, data(masks), share=0.05)
    assert found.left_out == ("green", "cross")
    assert found.names == ("red", "blue", "disc")
    assert "left out, in no image: 2 concepts (green, cross)" in repr(found)
    with pytest.raises(InputError, match="None of the 5 concepts occurs in any of the 40 images"):
        dissect(model, "relu", x, data(torch.zeros_like(masks)))


def test_a_dead_unit_stands_for_nothing() -> None:
    model, (x, masks) = network(), scene()
    with torch.no_grad():
        model.conv.weight[3], model.conv.bias[3] = 0.0, -1.0  # pyrefly: ignore
    dead = dissect(model, "relu", x, data(masks), share=0.05).units[3]
    assert (dead.concept, dead.category, dead.iou, dead.threshold) == (None, None, 0.0, 0.0)


def test_bad_places_and_rotations() -> None:
    model, (x, masks) = network(), scene()
    with pytest.raises(InputError, match=r"needs maps .* 'head' \(Linear\) gives 2 per image.*before the positions"):
        dissect(model, "head", x, data(masks))
    with pytest.raises(MismatchError, match=r"The rotation is \(5, 5\), but 'relu' has 6 units"):
        dissect(model, "relu", x, data(masks), rotation(5, 1, 0))
    with pytest.raises(InputError, match="differs from the identity by 3"):
        dissect(model, "relu", x, data(masks), 2 * torch.eye(6))
    with torch.no_grad():
        model.conv.weight[0] = torch.nan
    with pytest.raises(InputError, match="activations hold NaN or infinity"):
        dissect(model, "conv", x, data(masks))


def test_bad_masks() -> None:
    model, (x, masks) = network(), scene()
    with pytest.raises(InputError, match=r"masks are 12×6, but the images 12×12: their aspect ratios differ"):
        dissect(model, "relu", x, masks[..., :6])
    for width, fits in ((30, False), (32, True), (33, False)):  # images 32×32: sides may be 3 % off
        wide = torch.randn(4, 3, 32, 32)
        some = torch.rand(4, 5, 32, width) > 0.5
        if fits:
            assert dissect(model, "relu", wide, some).images == 4
        else:
            with pytest.raises(InputError, match=rf"masks are 32×{width}, but the images 32×32"):
                dissect(model, "relu", wide, some)
    smaller = functional.avg_pool2d(masks[20:].float(), 2) > 0.5
    with pytest.raises(
        InputError, match=r"masks of image 20 are 6×6, but those of the first are 12×12. Resize all masks to one size"
    ):
        dissect(model, "relu", x, [masks[:20], smaller])
    for wrong in (masks[:39], torch.cat([masks, masks[:2]])):
        with pytest.raises(MismatchError, match=f"There are 40 images, but masks of {len(wrong)}"):
            dissect(model, "relu", x, wrong)
    with pytest.raises(InputError, match="True and False, or 0 and 1, but are float32 numbers"):
        dissect(model, "relu", x, masks.float())
    with pytest.raises(InputError, match=r"masks of 5 concepts is a tensor \(40, 3, 12, 12\)"):
        dissect(model, "relu", x, ConceptData(NAMES, KINDS, [masks[:, :3]]))
    with pytest.raises(InputError, match=r"first batch of masks is a tensor \(5, 12, 12\)"):
        dissect(model, "relu", x, [masks[0]])
    with pytest.raises(InputError, match=r"concepts is .*int.*, which holds no masks"):
        concept_data(3)
    with pytest.raises(MismatchError, match="has the concept 9, but there are 5"):
        dissect(model, "relu", x, ConceptData(NAMES, KINDS, [[Labels(torch.tensor([9]), masks[0, :1])]]))
    with pytest.raises(InputError, match="has 2 concepts, but its masks are a tensor"):
        dissect(model, "relu", x, ConceptData(NAMES, KINDS, [[Labels(torch.tensor([0, 1]), masks[0, :1])]]))


def test_bad_concepts_images_and_settings() -> None:
    model, (x, masks) = network(), scene()
    with pytest.raises(InputError, match="found 2 names and 1 categories"):
        ConceptData(("a", "b"), ("x",), [])
    with pytest.raises(InputError, match="Two concepts have the name 'a'"):
        ConceptData(("a", "a"), ("x", "x"), [])
    for source in (iter([masks]), (one for one in [masks])):
        with pytest.raises(InputError, match="masks are a generator, which can be read only once"):
            ConceptData(NAMES, KINDS, source)

    def stream() -> Iterator[tuple[Tensor, None]]:
        yield x, None

    with pytest.raises(InputError, match="images are a generator, which can be read only once"):
        dissect(model, "relu", stream(), data(masks))
    with pytest.raises(InputError, match=r"share must be between 0 and 1, such as 0.005, but is 1.5"):
        dissect(model, "relu", x, data(masks), share=1.5)
    with pytest.raises(InputError, match=r"null must be at least 0 and less than the number of images, 40, but is 40"):
        dissect(model, "relu", x, data(masks), null=40)
    with pytest.raises(InputError, match="at least one alpha and one seed"):
        rotation_scan(model, "relu", x, data(masks), [])
    top = TopValues(10, 0.1)
    top.add(torch.zeros(1, 4))
    with pytest.raises(InputError, match="There must be 10 values per unit, but there are 4"):
        top.threshold()


def test_maps_are_kept_as_long_as_they_fit() -> None:
    model, x = nn.Conv2d(3, 4, 1), torch.randn(10, 3, 6, 6)
    size = 4 * 10 * 4 * 6 * 6  # bytes in single precision
    model = nn.Sequential(model)
    assert Maps(model, "0", x, memory=size).cached
    assert not Maps(model, "0", x, memory=size - 1).cached


def test_scans_begin_at_the_basis_of_the_network() -> None:
    assert ALPHAS[0] == 0.0
    assert ALPHAS[-1] == 1.0
