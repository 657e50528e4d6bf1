"""Dissection in rotated bases, with and without the residual ReLU (Godfrey et al. 2022, figures 3, 18, 19).

Trains both kinds of network on pictures of concepts, dissects them in the bases Q^α, writes one row per network, place
and rotation, and draws the fraction of interpretable units against α. Trained networks are kept in a folder.

    python experiments/dissection.py --out out/dissection.json --plot out/dissection.svg
    python experiments/dissection.py --small --plot out/small.svg        # a minute or two on two cores
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
import tomllib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from intertwine import zoo
from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.inspect.dissection_pictures import draw_fractions
from intertwine.inspect.rotation_scan import rotation_scan
from intertwine.zoo.concepts import concept_images
from intertwine.zoo.precision import find_device

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
TABLES = ("data", "networks", "dissection")
#: What the networks are called, by whether they have the ReLU.
KINDS = {True: "with residual ReLU", False: "without"}
Report = Callable[[str], None]
Plan = dict[str, dict[str, Any]]


def read_plan(file: Path, small: bool = False) -> Plan:
    """The plan of a file; `small` puts its table [small] over it, entry by entry."""
    try:
        entries = tomllib.loads(file.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"The plan {file} cannot be read: {error}.") from error
    smaller = entries.pop("small", {})
    if set(entries) != set(TABLES) or not set(smaller) <= set(TABLES):
        raise InputError(f"{file} is no plan of a dissection: its tables must be {', '.join(TABLES)}, and [small].")
    return {name: entries[name] | (smaller.get(name, {}) if small else {}) for name in TABLES}


def run(plan: Plan, folder: Path, device: torch.device, report: Report) -> list[dict[str, Any]]:
    """Train what is not yet trained, dissect, and give one row per network, place and rotation."""
    data, networks, wanted = (plan[name] for name in TABLES)
    pictures = concept_images(data["pictures"], data["seed"], data["size"], data["task"])
    seen = concept_images(wanted["pictures"], wanted["seed"], data["size"], data["task"])
    rows = []
    for relu, kind in KINDS.items():
        trained = zoo.train(
            networks["architecture"], seeds=range(networks["seeds"]), data=pictures.dataset(data["test"]),
            out=folder / ("relu" if relu else "no-relu"), recipe=networks["recipe"], device=str(device),
            options={**networks["options"], "residual_relu": relu}, **networks["changes"],
        )  # fmt: skip
        for seed in range(networks["seeds"]):
            model = trained[seed].eval().to(device)
            report(f"{kind}, seed {seed}: accuracy {trained.records[seed].accuracy:.3f}")
            for at in wanted["at"]:
                scan = rotation_scan(
                    model, at, seen.inputs(), seen.concepts, wanted["alphas"], seeds=range(wanted["rotations"])
                )
                report(f"  {scan!r}")
                about = {"kind": kind, "network": seed, "accuracy": trained.records[seed].accuracy}
                rows += [about | {"chance": scan.chance} | row for row in scan.to_rows()]
    return rows


def result_of(plan: Plan, folder: Path, device: torch.device, report: Report) -> dict[str, Any]:
    """The rows with how they came about."""
    start = time.perf_counter()
    rows = run(plan, folder, device, report)
    manifest = {
        "plan": plan, "device": str(device), "torch": torch.__version__, "python": platform.python_version(),
        "seconds": round(time.perf_counter() - start, 1), "finished": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    return {"manifest": manifest, "rows": rows}


def curves(result: Mapping[str, Any]) -> dict[str, dict[float, list[float]]]:
    """Kind and place → α → fractions, one per network and rotation."""
    found: dict[str, dict[float, list[float]]] = {}
    for row in result["rows"]:
        some = found.setdefault(f"{row['kind']}, {row['at']}", {})
        some.setdefault(row["alpha"], []).append(row["fraction"])
    return found


def table(result: Mapping[str, Any]) -> str:
    """The mean fraction of every kind and place, and how it changes from α = 0 to the largest α."""
    lines = []
    for name, curve in curves(result).items():
        means = {alpha: sum(some) / len(some) for alpha, some in sorted(curve.items())}
        first, *_, last = means.values() if len(means) > 1 else [*means.values()] * 2
        numbers = "  ".join(f"{alpha:g}: {mean:6.1%}" for alpha, mean in means.items())
        lines.append(f"{name:36s}{numbers}   change {last - first:+.1%}")
    return "\n".join(lines)


def draw(result: Mapping[str, Any]) -> Figure:
    """The figure in the paper's form."""
    return draw_fractions(curves(result))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--plan", type=Path, default=HERE / "dissection.toml")
    parser.add_argument("--small", action="store_true", help="small networks and few pictures")
    parser.add_argument("--zoo", type=Path, help="folder of trained networks (out/dissection, or -small)")
    parser.add_argument("--device", help="cpu, cuda, …; a GPU if there is one")
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument("--plot", type=Path, help="the figure, .svg or .png")
    parser.add_argument("--draw", type=Path, help="only draw, from this result file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        if options.draw:
            result = json.loads(options.draw.read_text(encoding="utf-8"))
        else:
            plan = read_plan(options.plan, options.small)
            folder = options.zoo or Path("out/dissection-small" if options.small else "out/dissection")
            result = result_of(plan, folder, find_device(options.device), lambda line: print(line, flush=True))
            print(table(result))
    except (InputError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(result).savefig(options.plot, metadata={"Date": None} if options.plot.suffix == ".svg" else None)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
