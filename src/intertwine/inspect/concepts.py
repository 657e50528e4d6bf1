"""Concepts: what pixels of images show, as masks per image, with names and categories."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from intertwine.errors import InputError, MismatchError
from intertwine.features.batches import kind_of
from intertwine.shapes import Int

#: The category of concepts that come without one.
ONE_CATEGORY = "concept"
ADVICE = (
    "Give one batch of masks per batch of images, each a tensor (images, concepts, height, width) of True and False; "
    "or a ConceptData."
)


@dataclass(frozen=True, eq=False)
class Labels:
    """One image: the concepts that are in it, and the mask of each. Concepts that are not named here are absent."""

    concepts: Int[Tensor, " present"]
    masks: Tensor  # (present, height, width) of bool


@dataclass(frozen=True, eq=False)
class ConceptData:
    """Concepts over a data set.

    Attributes:
        names: of the concepts. categories: one word per concept, such as "colour" or "texture".
        batches: in the order of the images, tensors (images, concepts, height, width) of bool, or lists with one
            `Labels` per image; their sizes need not be those of the images' batches. They are read more than once.

    >>> import torch
    >>> masks = torch.zeros(4, 2, 8, 8, dtype=torch.bool)
    >>> ConceptData(("red", "round"), ("colour", "shape"), [masks])
    ConceptData(2 concepts of 2 categories: colour, shape)
    """

    names: tuple[str, ...]
    categories: tuple[str, ...]
    batches: Iterable[Any] = field(repr=False)

    def __post_init__(self) -> None:
        if not self.names or len(self.names) != len(self.categories):
            raise InputError(
                f"Concepts need one category each; found {len(self.names)} names and {len(self.categories)} categories."
            )
        check_again(self.batches)
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise InputError(f"Two concepts are called {twice!r}. Give every concept a name of its own.")

    @property
    def kinds(self) -> tuple[str, ...]:
        """The categories, each once, in the order of their first concept."""
        return tuple(dict.fromkeys(self.categories))

    def images(self) -> Iterator[Labels]:
        """What is in every image, one after the other."""
        for batch in self.batches:
            yield from _labels(batch, len(self.names))

    def __repr__(self) -> str:
        kinds = f"{len(self.kinds)} categor{'y' if len(self.kinds) == 1 else 'ies'}"
        return f"ConceptData({len(self.names)} concepts of {kinds}: {', '.join(self.kinds)})"


def concept_data(
    concepts: Any, names: Sequence[str] | None = None, categories: Sequence[str] | None = None
) -> ConceptData:
    """Concepts from whatever holds their masks: a ConceptData as it is, one tensor of masks, or batches of masks.

    >>> import torch
    >>> concept_data(torch.zeros(4, 2, 8, 8, dtype=torch.bool)).names
    ('concept 0', 'concept 1')
    """
    if isinstance(concepts, ConceptData):
        return concepts
    batches = [concepts] if isinstance(concepts, Tensor) else concepts
    if isinstance(batches, (str, bytes)) or not isinstance(batches, Iterable):
        raise InputError(f"Concepts were asked for; found {kind_of(concepts)}. {ADVICE}")
    check_again(batches)
    first = next(iter(batches), None)
    if not isinstance(first, Tensor) or first.dim() != 4:
        raise InputError(f"The first batch of masks is {kind_of(first)}. {ADVICE}")
    found = tuple(names or (f"concept {i}" for i in range(first.shape[1])))
    return ConceptData(found, tuple(categories or [ONE_CATEGORY] * len(found)), batches)


def check_again(batches: Iterable[Any]) -> None:
    """Refuse masks that can be read only once."""
    if isinstance(batches, Iterator):
        raise InputError(
            "The masks are a generator, which can be read once; they are read again to see what chance gives, and for "
            "every rotation. Pass a tensor, a list, or an object whose __iter__ begins anew."
        )


def _labels(batch: Any, count: int) -> Iterator[Labels]:
    if isinstance(batch, Tensor):
        if batch.dim() != 4 or batch.shape[1] != count:
            raise InputError(f"A batch of masks of {count} concepts is {kind_of(batch)}. {ADVICE}")
        for masks in as_masks(batch):
            present = masks.flatten(1).any(1).nonzero()[:, 0]
            yield Labels(present, masks[present])
        return
    if not isinstance(batch, (list, tuple)) or not all(isinstance(one, Labels) for one in batch):
        raise InputError(f"A batch of masks is {kind_of(batch)}. {ADVICE}")
    for one in batch:
        if len(one.concepts) != len(one.masks) or one.masks.dim() != 3:
            raise InputError(
                f"An image names {len(one.concepts)} concepts, but its masks are {kind_of(one.masks)}. Give one mask "
                "(height, width) per concept."
            )
        if len(one.concepts) and not 0 <= int(one.concepts.min()) <= int(one.concepts.max()) < count:
            raise MismatchError(
                f"An image names the concept {int(one.concepts.max())}, but there are {count}, counted from 0."
            )
        yield Labels(one.concepts, as_masks(one.masks))


def as_masks(masks: Tensor) -> Tensor:
    """Masks as bool; whole numbers must be 0 and 1."""
    if masks.dtype == torch.bool:
        return masks
    if masks.is_floating_point() or bool(((masks != 0) & (masks != 1)).any()):
        kind = str(masks.dtype).removeprefix("torch.")
        raise InputError(
            f"Masks are True and False, or 0 and 1; found {kind} numbers. A map of labels becomes masks by "
            "(labels[:, None] == torch.arange(count)[:, None, None])."
        )
    return masks.bool()
