"""The experiments by name: where their plans are, how one is carried out, and the result files."""

from __future__ import annotations

import json
import platform
import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from intertwine.errors import InputError
from intertwine.features.pictures import put_title
from intertwine.files import write_json, writing
from intertwine.reproduce.claims import Claim, Line, claims, lines
from intertwine.reproduce.kinds.registry import Numbers, Row, kind
from intertwine.reproduce.networks import Tell
from intertwine.reproduce.plan import Plan, read_plan
from intertwine.reproduce.work import Work
from intertwine.version import VERSION

#: Beside the package in a checkout, inside it where it is installed.
PLACES = (Path(__file__).parents[3] / "experiments", Path(__file__).parents[1] / "experiments")


#: How a figure is written: the same bytes every time, titles of panels smaller than that of the figure.
STYLE = {"svg.hashsalt": "intertwine", "font.size": 9, "axes.titlesize": 9}


@dataclass(frozen=True)
class Result:
    """What an experiment found. `manifest`: plan, device, versions, time."""

    manifest: dict[str, Any]
    rows: list[Row]

    @property
    def plan(self) -> dict[str, Any]:
        return self.manifest["plan"]

    @property
    def numbers(self) -> Numbers:
        """Series → place → one value per pair."""
        return kind(self.plan["kind"]).numbers(self.plan, self.rows)

    def lines(self) -> list[Line]:
        """Every printed number beside ours."""
        return lines(self.plan, self.numbers)

    def claims(self) -> list[Claim]:
        """What the paper says in words, tested."""
        return claims(self.plan, self.numbers)

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": self.manifest, "rows": self.rows}

    def save(self, file: str | Path) -> Path:
        """Write the result file."""
        path = Path(file)
        write_json(path, self.to_dict())
        return path

    def plot(self, file: str | Path) -> Path:
        """Draw the figure as the paper has it; the ending of the name chooses the format."""
        import matplotlib

        path = Path(file)
        with writing(path) as part, matplotlib.rc_context(STYLE):
            figure = kind(self.plan["kind"]).draw(self.plan, self.rows)
            scale = "" if self.plan["scale"] == "paper" else f" (scale {self.plan['scale']})"
            put_title(figure, self.plan["title"] + scale)
            form = path.suffix.removeprefix(".") or "png"
            figure.savefig(part, format=form, metadata={"Date": None} if form == "svg" else None)
        return path


def plans_folder() -> Path:
    """The folder of the plans.

    Raises:
        InputError: it came neither with the package nor with a checkout.
    """
    for place in PLACES:
        if place.is_dir():
            return place
    raise InputError("The plans of the papers' experiments are not installed; run from a checkout of the project.")


def names() -> list[str]:
    """All experiments, paper by paper.

    >>> "godfrey-fig1" in names()
    True
    """
    return sorted((path.stem for path in plans_folder().glob("*.toml")), key=_order)


def _order(name: str) -> tuple[str, int, str]:
    """Figure 2 stands before figure 10."""
    numbered = re.search(r"(?:fig|table)(\d+)", name)
    return name.partition("-")[0], int(numbered[1]) if numbered else 0, name


def find(name: str, scale: str = "paper") -> Plan:
    """A plan by the name of its experiment, or by its file."""
    return read_plan(Path(name) if name.endswith(".toml") else plans_folder() / f"{name}.toml", scale)


def reproduce(
    plan: Plan | str,
    scale: str = "paper",
    *,
    folder: str | Path = "out/reproduce",
    data: str | Path | None = None,
    device: torch.device | str = "cpu",
    tell: Tell = lambda doing: None,
) -> Result:
    """Carry out an experiment of the papers.

    Args:
        plan: its name, its file or a plan. scale: "paper" as printed, "gpu" minutes on one GPU, "cpu" digits or MNIST.
        folder: of networks and of what was found; experiments share it, and one that was stopped goes on from there.
        data: the folder of the data sets (or the environment variable INTERTWINE_DATA). tell: called with what is done.
    """
    asked = plan if isinstance(plan, Plan) else find(plan, scale)
    start, place = time.perf_counter(), torch.device(device)
    work = Work(asked, Path(folder), place, tell, Path(data) if data is not None else None)
    rows = kind(asked.kind).run(work)
    manifest = {
        "plan": asked.to_dict(),
        "device": _device(place),
        "versions": {"intertwine": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.perf_counter() - start, 1),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"intertwine reproduce {asked.name} --scale {asked.scale}",
    }
    return Result(manifest, rows)


def _device(place: torch.device) -> str:
    if place.type == "cuda":
        return torch.cuda.get_device_name(place)
    threads = torch.get_num_threads()
    return f"CPU, {threads} thread{'s' if threads > 1 else ''}"


def read_result(file: str | Path) -> Result:
    """A result that was written before.

    Raises:
        InputError: no such file, or it is no result of an experiment.
    """
    path = Path(file)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        kind(found["manifest"]["plan"]["kind"])
        return Result(found["manifest"], found["rows"])
    except FileNotFoundError as error:
        raise InputError(f"The result {path} was to be read, which does not exist. Run its experiment.") from error
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path} is not the result of an experiment. Run the experiment again.") from error
