"""A folder of small images for tests of training."""

from pathlib import Path

import pytest


def write_images(folder: Path, side: int = 5) -> Path:
    """Two classes, dark and light, with four training and four test images each."""
    image = pytest.importorskip("PIL.Image")
    for part in ("train", "test"):
        for name, light in (("dark", 0), ("light", 200)):
            (folder / part / name).mkdir(parents=True)
            for i in range(4):
                image.new("RGB", (side, side), (light + 9 * i, light, light)).save(folder / part / name / f"{i}.png")
    return folder
