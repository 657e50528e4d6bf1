"""The table [similarity] of a plan: which layers are compared, by which family of measures, on how many images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from intertwine.errors import InputError

#: "procrustes": each layer with the same layer of the other network. "cka": every layer with every layer.
FAMILIES = ("procrustes", "cka")


@dataclass(frozen=True)
class Settings:
    """What [similarity] may say.

    Attributes:
        family: of `FAMILIES`. at: the layers, what the paper calls each → its module path; those inside residual blocks
            have a star. images: the first so many test images are looked at, all of them unless given. batch: at once.
    """

    family: str
    at: dict[str, str]
    images: int | None = None
    batch: int = 250

    def check(self, plan: Any, where: str) -> None:
        """Refuse a family that there is not.

        Raises:
            InputError: what is wrong and what it may be.
        """
        if self.family not in FAMILIES:
            raise InputError(
                f"{where}: [similarity] asks for the family {self.family!r}; there are {', '.join(FAMILIES)}."
            )
