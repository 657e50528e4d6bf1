"""Run experiments of the papers by name: results, their files and figures, and the comparison with printed numbers."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from decimal import Decimal
from itertools import pairwise
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import torch

from intertwine.errors import InputError
from intertwine.figures import wrapped_title
from intertwine.files import atomic_write, write_text
from intertwine.lab.papers.plan import ExperimentPlan, Numbers, Row, SummaryValue, experiment_kind, read_plan
from intertwine.lab.papers.work import Progress, Work
from intertwine.version import VERSION


@dataclass(frozen=True)
class PrintedNumber:
    """One printed number and ours. `spread`: one standard deviation over pairs.

    They agree if their difference is at most two deviations, those of both combined, plus the rounding of the printed
    number. `verdict`: "agrees", "differs", "no value", or "no interval" if neither has a deviation.
    """

    series: str
    label: str
    printed: float
    printed_spread: float | None
    mean: float | None
    spread: float | None
    count: int

    @property
    def difference(self) -> float | None:
        return None if self.mean is None else self.mean - self.printed

    @property
    def sigma(self) -> float:
        """The deviation of the difference."""
        return sqrt((self.spread or 0.0) ** 2 + (self.printed_spread or 0.0) ** 2)

    @property
    def rounding(self) -> float:
        """Half a unit of the last printed digit.

        >>> PrintedNumber("G_ReLU", "3", 98.4, None, 98.4375, 0.0, 2).rounding
        0.05
        """
        exponent = Decimal(str(self.printed)).as_tuple().exponent
        return 0.5 * 10.0**exponent if isinstance(exponent, int) else 0.0

    @property
    def verdict(self) -> str:
        if self.difference is None:
            return "no value"
        if abs(self.difference) <= 2 * self.sigma + self.rounding:
            return "agrees"
        return "differs" if self.spread is not None or self.printed_spread is not None else "no interval"


@dataclass(frozen=True)
class Claim:
    """A statement of a paper, whether it holds for our numbers (None: undecided), and where it was observed."""

    says: str
    holds: bool | None
    seen: str


def lines(plan: Mapping[str, Any], numbers: Numbers) -> list[PrintedNumber]:
    """Every printed number beside ours.

    >>> plan = {"labels": ["3"], "printed": {"full": [1.0]}, "spread": {}}
    >>> [(line.mean, line.verdict) for line in lines(plan, {"full": {"3": [1.5, 2.5]}})]
    [(2.0, 'agrees')]
    """
    found = []
    for series, values in plan["printed"].items():
        spreads = plan["spread"].get(series, [None] * len(values))
        for label, value, spread in zip(plan["labels"], values, spreads, strict=True):
            if value is not None:
                ours = numbers.get(series, {}).get(label, [])
                found.append(PrintedNumber(series, label, value, spread, *summary(ours), count(ours)))
    return found


def summary(values: Sequence[float]) -> tuple[float | None, float | None]:
    """Mean and standard deviation; None where there are too few values."""
    if isinstance(values, SummaryValue):
        return values[0], values.deviation
    return (fmean(values) if values else None), (stdev(values) if len(values) > 1 else None)


def count(values: Sequence[float]) -> int:
    """The number of values, also of those that a `SummaryValue` stands for.

    >>> count([1.0, 2.0]), count(SummaryValue(1.5, 0.7, 20))
    (2, 20)
    """
    return values.many if isinstance(values, SummaryValue) else len(values)


def claims(plan: Mapping[str, Any], numbers: Numbers) -> list[Claim]:
    """The plan's claims, tested on our numbers.

    A claim has `says` and one test of the means: `rising` (series in this order), or a `series` with a bound `below` or
    `above` it, a number or another series; at all labels, or at those of `labels`. `most`: how many may fail.

    >>> numbers = {"full": {"3": [1.0], "6": [2.0]}, "rank 1": {"3": [40.0], "6": [1.0]}}
    >>> claims({"claims": [{"says": "order", "rising": ["full", "rank 1"]}]}, numbers)
    [Claim(says='order', holds=False, seen='at 1 of 2 places (not at 6)')]
    """
    return [_claim(claim, numbers) for claim in plan["claims"]]


def _claim(claim: Mapping[str, Any], numbers: Numbers) -> Claim:
    tests = dict(_tests(claim, numbers))
    if not tests:
        return Claim(claim["says"], None, f"no numbers to test it on{_lacking(claim, numbers)}")
    failed = [label for label, held in tests.items() if not held]
    but = f" (not at {', '.join(failed)})" if failed else ""
    seen = f"at {len(tests) - len(failed)} of {len(tests)} places{but}"
    return Claim(claim["says"], len(failed) <= claim.get("most", 0), seen)


def _tests(claim: Mapping[str, Any], numbers: Numbers) -> Iterator[tuple[str, bool]]:
    bound = claim.get("below", claim.get("above"))
    if "rising" not in claim and ("series" not in claim or bound is None):
        raise InputError(f"The claim {claim['says']!r} has no test. Add rising, or a series with below or above.")
    series = _compared(claim)
    means = {name: {label: fmean(some) for label, some in numbers.get(name, {}).items() if some} for name in series}
    shared = [label for label in means[series[0]] if all(label in one for one in means.values())]
    for label in shared:
        if label in claim.get("labels", shared):
            yield label, _holds(claim, [means[name][label] for name in series], bound)


def _compared(claim: Mapping[str, Any]) -> list[str]:
    """The series of a claim."""
    bound = claim.get("below", claim.get("above"))
    return list(claim.get("rising") or [claim["series"], *([bound] if isinstance(bound, str) else [])])


def _lacking(claim: Mapping[str, Any], numbers: Numbers) -> str:
    """The series without values at the labels of the claim, in words.

    >>> _lacking({"rising": ["a", "b"], "labels": ["3"]}, {"a": {"3": [1.0]}, "b": {"4": [1.0]}})
    ': b has none there'
    """

    def there(name: str) -> bool:
        found = numbers.get(name, {})
        return any(found[label] for label in claim.get("labels", found) if label in found)

    lacks = [name for name in _compared(claim) if not there(name)]
    return f": {' and '.join(lacks)} {'has' if len(lacks) == 1 else 'have'} none there" if lacks else ""


def _holds(claim: Mapping[str, Any], values: Sequence[float], bound: float | int | str | None) -> bool:
    if "rising" in claim:
        return all(a < b for a, b in pairwise(values))
    edge = values[1] if bound is None or isinstance(bound, str) else float(bound)
    return values[0] < edge if "below" in claim else values[0] > edge


# -- Experiments by name --


#: The plans, beside the package in a checkout and inside it once installed.
PLACES = (Path(__file__).parents[4] / "experiments", Path(__file__).parents[2] / "experiments")


#: Significant digits of the numbers in a result file.
DIGITS = 6
#: Style of figures: the same bytes every time, titles of panels smaller than that of the figure.
STYLE = {"svg.hashsalt": "intertwine", "svg.fonttype": "none", "font.size": 9, "axes.titlesize": 9}


@dataclass(frozen=True)
class ExperimentResult:
    """The rows of an experiment. `manifest`: plan, device, versions, time."""

    manifest: dict[str, Any]
    rows: list[Row]

    @property
    def plan(self) -> dict[str, Any]:
        return self.manifest["plan"]

    @property
    def numbers(self) -> Numbers:
        """Series → place → one value per pair."""
        return experiment_kind(self.plan["kind"]).numbers(self.plan, self.rows)

    def lines(self) -> list[PrintedNumber]:
        """Every printed number beside ours."""
        return lines(self.plan, self.numbers)

    def claims(self) -> list[Claim]:
        """The statements of the paper, tested."""
        return claims(self.plan, self.numbers)

    def to_dict(self) -> dict[str, Any]:
        return {"manifest": self.manifest, "rows": self.rows}

    def save(self, file: str | Path) -> Path:
        """Write the result file: rows as tables, numbers with `DIGITS` significant digits."""
        path = Path(file)
        found = {"manifest": self.manifest, "tables": list(_tables(self.rows))}
        write_text(path, json.dumps(found, ensure_ascii=False, separators=(",", ":")) + "\n")
        return path

    def plot(self, file: str | Path) -> Path:
        """Draw the figure in the paper's form; the suffix of the name selects the format."""
        import matplotlib

        path = Path(file)
        with atomic_write(path) as part, matplotlib.rc_context(STYLE):
            figure = experiment_kind(self.plan["kind"]).draw(self.plan, self.rows)
            scale = "" if self.plan["scale"] == "paper" else f" (scale {self.plan['scale']})"
            wrapped_title(figure, self.plan["title"] + scale)
            form = path.suffix.removeprefix(".") or "png"
            figure.savefig(part, format=form, metadata={"Date": None} if form == "svg" else None)
        return path


def _tables(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Rows with the same entries as one table: the places of its rows, and its columns.

    A column is the list of its values, of one where all agree; or its distinct values and which of them each row has.

    >>> rows = [{"layer": "1", "loss": 0.12345678}, {"kept": 3}, {"layer": "1", "loss": 0.5}]
    >>> list(_tables(rows))[0]
    {'places': [0, 2], 'columns': {'layer': [['1']], 'loss': [[0.123457, 0.5]]}}
    >>> _rows(list(_tables(rows)))[1:]
    [{'kept': 3}, {'layer': '1', 'loss': 0.5}]
    """
    tables: dict[tuple[str, ...], list[int]] = {}
    for place, row in enumerate(rows):
        tables.setdefault(tuple(row), []).append(place)
    for entries, places in tables.items():
        yield {"places": places, "columns": {name: _column([rows[i][name] for i in places]) for name in entries}}


def _column(values: Sequence[Any]) -> list[list[Any]]:
    texts = [json.dumps(_rounded(value)) for value in values]
    distinct = list(dict.fromkeys(texts))
    index = [] if len(distinct) == 1 else list(map({text: i for i, text in enumerate(distinct)}.get, texts))
    if sum(map(len, distinct)) + len(json.dumps(index)) > sum(map(len, texts)):
        return [list(map(json.loads, texts))]
    return [list(map(json.loads, distinct)), *([index] if index else [])]


def _rows(tables: Sequence[Mapping[str, Any]]) -> list[Row]:
    """The rows of `_tables`, each in its place."""
    found: dict[int, Row] = {}
    for table in tables:
        places = table["places"]
        full = {}
        for name, (values, *index) in table["columns"].items():
            full[name] = [values[i] for i in index[0]] if index else values * (len(places) if len(values) == 1 else 1)
        found |= {place: {name: column[i] for name, column in full.items()} for i, place in enumerate(places)}
    return [found[place] for place in sorted(found)]


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(entry) for name, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(entry) for entry in value]
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


def plans_folder() -> Path:
    """The folder of the plans; an `InputError` if neither the package nor the checkout has it."""
    for place in PLACES:
        if place.is_dir():
            return place
    raise InputError("The plans of the papers' experiments are not installed. Run from a checkout of the project.")


def names() -> list[str]:
    """All experiments, paper by paper.

    >>> "godfrey-fig1" in names()
    True
    """

    def order(name: str) -> tuple[str, int, str]:  # figure 2 before figure 10
        numbered = re.search(r"(?:fig|table)(\d+)", name)
        return name.partition("-")[0], int(numbered[1]) if numbered else 0, name

    return sorted((path.stem for path in plans_folder().glob("*.toml")), key=order)


def find(name: str, scale: str = "paper") -> ExperimentPlan:
    """A plan by the name of its experiment, or by its file."""
    return read_plan(Path(name) if name.endswith(".toml") else plans_folder() / f"{name}.toml", scale)


def reproduce(
    plan: ExperimentPlan | str,
    scale: str = "paper",
    *,
    folder: str | Path = "out/reproduce",
    data: str | Path | None = None,
    device: torch.device | str = "cpu",
    progress: Progress = lambda step: None,
) -> ExperimentResult:
    """Run an experiment of the papers.

    Args:
        plan: its name, its file or a plan. scale: "paper" as printed, "gpu" minutes on one GPU, "cpu" digits or MNIST.
        folder: of networks and cached rows; experiments share it, and a stopped one is resumed from it.
        data: the folder of the data sets (or the environment variable INTERTWINE_DATA).
        progress: called with a description of every step.
    """
    spec = plan if isinstance(plan, ExperimentPlan) else find(plan, scale)
    start, place, threads = time.perf_counter(), torch.device(device), torch.get_num_threads()
    work = Work(spec, Path(folder), place, progress, Path(data) if data is not None else None)
    rows = experiment_kind(spec.kind).run(work)
    cpu = f"CPU, {threads} thread{'s' if threads > 1 else ''}"
    manifest = {
        "plan": spec.to_dict(),
        "device": torch.cuda.get_device_name(place) if place.type == "cuda" else cpu,
        "versions": {"intertwine": VERSION, "torch": torch.__version__, "python": platform.python_version()},
        "seconds": round(time.perf_counter() - start, 1),
        "finished": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": f"intertwine reproduce {spec.name} --scale {spec.scale}",
    }
    return ExperimentResult(manifest, rows)


def read_result(file: str | Path) -> ExperimentResult:
    """A result from its file.

    Raises:
        InputError: there is no such file, or it is not the result of an experiment.
    """
    path = Path(file)
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        experiment_kind(found["manifest"]["plan"]["kind"])
        return ExperimentResult(found["manifest"], found["rows"] if "rows" in found else _rows(found["tables"]))
    except FileNotFoundError as error:
        name, _, scale = path.stem.partition(".")
        command = f"intertwine reproduce {name or 'NAME'} --scale {scale or 'paper'}"
        raise InputError(
            f"The result {path} does not exist. Results of the papers' experiments are not installed with the package: "
            f"they are in a checkout of the project under experiments/results, or `{command}` makes one."
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise InputError(f"{path} is not the result of an experiment. Run the experiment again.") from error
