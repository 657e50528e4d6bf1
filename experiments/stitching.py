"""The stitching figures of Godfrey et al. 2022 and Csiszárik et al. 2021, one plan each under experiments/stitching.

Trains the networks of a plan, stitches its pairs, writes one row per stitch and draws the figure in the paper's form.
Networks and stitches are kept in a folder; a run that was stopped goes on from there.

    python experiments/stitching.py godfrey-figure1 --data DIR --out out/figure1.json --plot out/figure1.svg
    python experiments/stitching.py godfrey-figure1 --small --plot out/small.svg    # the digits: seconds on two cores
    python experiments/stitching.py godfrey-figure1 --draw out/figure1.json --plot out/figure1.svg
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import torch
from stitching_figures import FORMS, draw
from stitching_plan import Plan, read_plan
from stitching_rows import family_name
from stitching_runs import Report, pairs, read_data, run

from intertwine.errors import InputError
from intertwine.files import write_json
from intertwine.stitch.pictures import summary
from intertwine.zoo.precision import find_device

HERE = Path(__file__).parent
PLANS = HERE / "stitching"


def result_of(plan: Plan, folder: Path, data: Path | None, device: torch.device, report: Report) -> dict[str, Any]:
    """The rows of a plan with how they came about."""
    start = time.perf_counter()
    images = read_data(plan.data, data)
    rows = run(plan, images, folder, device, report)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    return {
        "manifest": {
            "plan": plan.to_dict(),
            "pairs": len(pairs(plan)),
            "images_checksum": images.checksum,
            "device": name,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "seconds": round(time.perf_counter() - start, 1),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        },
        "rows": rows,
    }


def table(result: dict[str, Any]) -> str:
    """Mean and deviation at every place, per family and fit: the lines a person wants to see first."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for row in result["rows"]:
        value = row["penalty"] if row["penalty"] is not None else row["loss"]
        found.setdefault((row["label"], family_name(row), row["fit"]), []).append(value)
    lines = [f"{'layer':>12s}  {'family':16s}{'fit':8s}{'penalty':>9s}"]
    for (label, family, fit), some in found.items():
        mean, spread = summary(some)
        lines.append(f"{label:>12s}  {family:16s}{fit:8s}{mean:9.4f} ± {spread:.4f} ({len(some)})")
    return "\n".join(lines)


def save(result: dict[str, Any], picture: Path) -> None:
    """Draw the figure into a file; the ending of its name chooses the format."""
    import matplotlib

    with matplotlib.rc_context({"svg.hashsalt": "intertwine", "font.size": 9}):
        figure = draw(result)
        picture.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(picture, metadata={"Date": None} if picture.suffix == ".svg" else None)


def _read(file: Path) -> dict[str, Any]:
    """A result that was written before."""
    if not file.is_file():
        raise InputError(f"{file} was to be drawn, which does not exist. Run the plan first, with --out {file}.")
    return json.loads(file.read_text(encoding="utf-8"))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    names = sorted(path.stem for path in PLANS.glob("*.toml"))
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0], epilog=f"plans: {', '.join(names)}; or the path of your own"
    )
    parser.add_argument("plan", help="the name of a plan, or its file")
    parser.add_argument("--small", action="store_true", help="tiny networks on the digits, seconds on two cores")
    parser.add_argument("--zoo", type=Path, default=Path("out/stitching"), help="folder of networks and stitches")
    parser.add_argument("--data", type=Path, help="folder with the data (or the environment variable INTERTWINE_DATA)")
    parser.add_argument("--device", help="cpu, cuda, …; a GPU if there is one")
    parser.add_argument("--out", type=Path, help="the result file, JSON")
    parser.add_argument("--plot", type=Path, help="the figure, .svg or .png")
    parser.add_argument("--draw", type=Path, help="only draw, from this result file")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    options = _options(arguments)
    try:
        file = Path(options.plan) if options.plan.endswith(".toml") else PLANS / f"{options.plan}.toml"
        plan = read_plan(file, options.small)
        if plan.form not in FORMS:
            raise InputError(f"{file}: the form is {plan.form!r}; there are {', '.join(FORMS)}.")
        if options.draw:
            result = _read(options.draw)
        else:
            tell = partial(print, flush=True)
            result = result_of(plan, options.zoo, options.data, find_device(options.device), tell)
            print(table(result))
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.out:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        write_json(options.out, result)
    if options.plot:
        save(result, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
