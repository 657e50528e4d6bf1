"""What a killed run leaves: the state of the stitches in training, one file per group, written whole or not at all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from intertwine.errors import InputError
from intertwine.files import write_tensors


@dataclass(frozen=True)
class Left:
    """A training as it was left: its tensors, and everything about it that is no tensor."""

    tensors: dict[str, Tensor]
    about: dict[str, Any]


@dataclass(frozen=True)
class Store:
    """A folder for one plan. A folder that holds another plan's state is refused."""

    folder: Path | None
    plan: Mapping[str, Any]

    def _file(self, group: int) -> Path | None:
        return None if self.folder is None else self.folder / f"state{group}.safetensors"

    def write(self, group: int, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        """Keep the state of a group."""
        file = self._file(group)
        if file is not None:
            write_tensors(file, tensors, {"about": json.dumps({"plan": self.plan, "left": about})})

    def read(self, group: int) -> Left | None:
        """The state of a group, if there is one."""
        file = self._file(group)
        if file is None or not file.exists():
            return None
        with safe_open(file, "pt") as opened:
            about = json.loads((opened.metadata() or {}).get("about", "{}"))
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 - no mapping
        wanted = json.loads(json.dumps(dict(self.plan)))
        if about.get("plan") != wanted:
            found = about.get("plan", {})
            differ = [key for key in wanted if found.get(key) != wanted[key]] or ["its form"]
            raise InputError(
                f"Stitches were to be taken up again in {self.folder}, but it holds those of another plan, which "
                f"differs in {', '.join(differ)}. Give another folder, or remove this one."
            )
        return Left(tensors, about["left"])
