"""A folder of images, one folder per class: `train/CLASS/*.png` and `test/CLASS/*.png` (or `val/`)."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from intertwine.errors import InputError
from intertwine.zoo.datasets.dataset import Dataset
from intertwine.zoo.datasets.extra import extra

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".webp")
LAYOUT = "Expected train/CLASS/*.png and test/CLASS/*.png (val/ is as good as test/, and .jpg as .png)."


def read_image_folder(folder: Path, size: int | None = None, name: str | None = None) -> Dataset:
    """The images of a folder as a data set, in RGB, classes and files in the order of their names.

    Args:
        folder: holds `train/` and `test/` or `val/`, and these a folder per class.
        size: every image is stretched to size × size pixels; None takes them as they are, if all are equal.
        name: what to call the data set.

    The normalisation is the mean and the standard deviation of the training pixels.
    """
    if size is not None and size < 1:
        raise InputError(f"images of {size} × {size} pixels were asked for; the size is at least 1.")
    train, test = _splits(folder)
    classes = _classes(train)
    unknown = sorted(set(_classes(test)) - set(classes))
    if unknown:
        raise InputError(f"{test} holds classes that {train} does not: {', '.join(unknown)}. {LAYOUT}")
    learned, tested = _part(train, classes, size), _part(test, classes, size)
    pixels = learned[0].reshape(-1, 3)
    mean = [float(value) for value in pixels.mean(0, dtype=np.float64)]
    std = [float(value) or 1.0 for value in pixels.std(0, dtype=np.float64)]  # a channel that never changes is kept
    return Dataset.of(name or f"folder:{folder}", learned, tested, mean, std, classes)


def _splits(folder: Path) -> tuple[Path, Path]:
    names = ("train", "test", "val")
    found = {name: folder / name for name in names if (folder / name).is_dir()}
    if "train" not in found or len(found) < 2:
        held = f"only {', '.join(f'{name}/' for name in found)}" if found else "neither"
        raise InputError(f"{folder} should hold train/ and test/ or val/, but holds {held}. {LAYOUT}")
    return found["train"], found.get("test") or found["val"]


def _classes(split: Path) -> list[str]:
    return sorted(entry.name for entry in split.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _part(split: Path, classes: list[str], size: int | None) -> tuple[np.ndarray, np.ndarray]:
    files = [(file, label) for label, name in enumerate(classes) for file in _images(split / name)]
    if not files:
        raise InputError(f"{split} holds no images ({', '.join(ENDINGS)}) in folders of classes. {LAYOUT}")
    first, *rest = images = [_pixels(file, size) for file, _ in files]
    for (file, _), image in zip(files[1:], rest, strict=True):
        if image.shape != first.shape:
            raise InputError(
                f"{files[0][0]} has {first.shape[1]} × {first.shape[0]} pixels and {file} has {image.shape[1]} × "
                f"{image.shape[0]}; pass size=32, say, to bring all of them to one size."
            )
    return np.stack(images), np.array([label for _, label in files])


def _images(folder: Path) -> list[Path]:
    return sorted(file for file in folder.glob("*") if file.suffix.lower() in ENDINGS)


def _pixels(file: Path, size: int | None) -> np.ndarray:
    image = extra("PIL.Image", "Pillow", "a folder of images")
    try:
        with image.open(file) as opened:
            picture = opened.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise InputError(f"{file} could not be read as an image ({error}). Remove it or replace it.") from error
    return np.asarray(picture if size is None else picture.resize((size, size), image.Resampling.BILINEAR))
