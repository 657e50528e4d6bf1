"""Where `dissect` takes images and concepts from: a Broden folder, or pictures drawn for a network's input size."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from intertwine.commands.networks import zoo_data
from intertwine.errors import InputError
from intertwine.inspect.broden import MEAN, STD, BrodenLabels, read_broden
from intertwine.inspect.concepts import ConceptData
from intertwine.models import Loaded
from intertwine.zoo.concepts import SMALLEST, concept_images

SYNTHETIC = "synthetic"
#: Pictures to dissect with are others than those of `concept_images(…, seed=0)`, which networks are trained on.
SEED = 1
#: Of the drawn pictures, for pixels from 0 to 1, as `ConceptImages.inputs` has them.
DRAWN = ((110 / 255,) * 3, (60 / 255,) * 3)
Normalisation = tuple[Sequence[float], Sequence[float]]


@dataclass(frozen=True, eq=False)
class Seen:
    """What a network is dissected with."""

    name: str
    images: Any
    concepts: ConceptData


def concepts_for(options: Namespace, loaded: Loaded) -> Seen:
    """The images at the size a network takes and normalised as it saw them, with the masks of their concepts."""
    size, mean, std = _size(loaded), *_normalisation(options)
    if options.concepts != SYNTHETIC:
        return _broden(options, size, mean, std)
    if options.split is not None:
        raise InputError(f"--split {options.split} is a part of a Broden folder; synthetic pictures have no parts.")
    if size[0] != size[1] or size[0] < SMALLEST:
        raise InputError(
            f"Synthetic pictures are squares of at least {SMALLEST}×{SMALLEST}, but {loaded.name} takes images of "
            f"{size[0]}×{size[1]}. Give another --input, or a Broden folder by --concepts."
        )
    drawn = concept_images(options.samples, SEED, size[0])
    pixels = drawn.images.movedim(-1, 1).float() / 255
    inputs = (pixels - _per_channel(mean)) / _per_channel(std)
    return Seen("synthetic concepts", [(part, None) for part in inputs.split(options.batch)], drawn.concepts)


def _broden(options: Namespace, size: tuple[int, int], mean: Sequence[float], std: Sequence[float]) -> Seen:
    """So many images of a Broden folder, over the whole of it."""
    found = read_broden(options.concepts, options.split, size, options.batch, mean, std)
    images, labels = found.images, found.concepts.batches
    assert isinstance(labels, BrodenLabels)  # read_broden has no others
    count = min(options.samples, images.samples)
    chosen = [i * images.samples // count for i in range(count)]
    few = replace(images, files=tuple(images.files[i] for i in chosen))
    masks = replace(labels, rows=tuple(labels.rows[i] for i in chosen))
    return Seen(Path(options.concepts).name, few, replace(found.concepts, batches=masks))


def _size(loaded: Loaded) -> tuple[int, int]:
    shape = tuple(loaded.args[0].shape) if loaded.args and isinstance(loaded.args[0], torch.Tensor) else ()
    if len(shape) != 4 or shape[1] != 3:
        raise InputError(
            f"{loaded.name} is called with {', '.join(loaded.inputs)}; dissection shows it images with three colours. "
            "Give a network of images, or its input, such as --input 1x3x224x224."
        )
    return shape[2], shape[3]


def _normalisation(options: Namespace) -> Normalisation:
    """Mean and deviation that the network wants: as written, else its zoo's, else those of the images' kind."""
    if (options.mean is None) != (options.std is None):
        raise InputError("--mean and --std belong together; give both, such as --mean 0.5,0.5,0.5 --std 0.5,0.5,0.5.")
    if options.mean is not None:
        return _three("--mean", options.mean), _three("--std", options.std)
    learnt = zoo_data(options.model)
    if learnt is not None:
        return [m / 255 for m in learnt["mean"]], [s / 255 for s in learnt["std"]]
    return DRAWN if options.concepts == SYNTHETIC else (MEAN, STD)


def _three(what: str, text: str) -> list[float]:
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    if len(found) != 3 or (what == "--std" and min(found) <= 0):
        raise InputError(f"{what} {text} was asked for. Write three numbers, such as {what} 0.5,0.5,0.5; std above 0.")
    return found


def _per_channel(values: Sequence[float]) -> torch.Tensor:
    return torch.tensor(values)[:, None, None]
