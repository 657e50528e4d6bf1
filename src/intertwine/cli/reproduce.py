"""`intertwine reproduce NAME …`: runs experiments of the papers and shows their numbers beside the printed ones."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from intertwine.lab.papers.experiments import ExperimentResult, PrintedNumber
    from intertwine.lab.papers.plan import ExperimentPlan

SCALES = ("paper", "gpu", "cpu")
#: The name that stands for all experiments.
ALL = "all"
#: The ending of result files; a path with another ending is a folder.
FILE = ".json"
COLOURS = {"agrees": "green", "differs": "yellow", "no value": "dim", "no interval": "dim"}


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Run experiments of the papers and show their numbers beside the printed ones. Networks and results are kept "
        "in the folder; the same command resumes a run that was stopped."
    )
    command.add_argument(
        "names", metavar="NAME", nargs="*", help="names of experiments (see --list), all, or the file of a plan"
    )
    command.add_argument(
        "--scale", choices=SCALES, default="paper",
        help="as printed (default), minutes on one GPU, or seconds on digits to see that it works",
    )  # fmt: skip
    command.add_argument("--list", action="store_true", help="show all experiments, what they need and what they cost")
    command.add_argument(
        "--out", metavar="DIR", default="out/reproduce", help="networks, results and figures (default out/reproduce)"
    )
    command.add_argument("--results", metavar="PATH", help="a folder for result files, or the file of one experiment")
    command.add_argument("--data-folder", metavar="DIR", help="the folder of the data sets (default: INTERTWINE_DATA)")
    arguments.add_device(command)
    command.add_argument("--plot", metavar="FILE", help="the figure of one experiment, .svg or .png")
    command.add_argument("--draw", metavar="RESULT", help="run nothing: show and draw a result that was written before")
    arguments.add_json(command)


@dataclass(frozen=True)
class ExperimentRun:
    """A result, and the files of it and of its figure."""

    result: ExperimentResult
    file: Path
    figure: Path

    def to_dict(self) -> dict[str, Any]:
        """As plain data, with the verdicts."""
        plan, manifest = self.result.plan, self.result.manifest
        about = {"name": plan["name"], "scale": plan["scale"], "seconds": manifest["seconds"]}
        lines = [asdict(line) | {"verdict": line.verdict} for line in self.result.lines()]
        found = {"lines": lines, "claims": [asdict(claim) for claim in self.result.claims()]}
        return about | found | {"result": str(self.file), "figure": str(self.figure)}


def run(options: Namespace) -> int:
    """Carry out the command."""
    output.check_picture(options.plot)
    if options.list:
        _list(options.json)
        return 0
    done = [_drawn(options)] if options.draw else list(_results(options))
    if options.json:
        output.print_json({"experiments": [one.to_dict() for one in done]})
    else:
        output.show(*(experiment_summary(one.result) for one in done))
        for one in done:
            words = f"{one.result.plan['name']}: result in {one.file}, figure in {one.figure}"
            output.terminal().print(output.text(words))
    return 0


def _plans(options: Namespace) -> list[ExperimentPlan]:
    """All plans, read before anything is run."""
    from intertwine.lab.papers.experiments import find, names

    if not options.names:
        raise InputError("No experiment is named. Give names, or all; --list shows what there is.")
    wanted = names() if ALL in options.names else list(dict.fromkeys(options.names))
    if len(wanted) > 1 and (options.plot or Path(options.results or "").suffix == FILE):
        flag = "--plot" if options.plot else "--results"
        raise InputError(f"{flag} names one file for {len(wanted)} experiments. Give a folder, or one experiment.")
    if options.data_folder and not Path(options.data_folder).is_dir():
        raise InputError(
            f"--data-folder {options.data_folder} is not a folder. Give the one that holds the data sets, or leave it "
            "out to use INTERTWINE_DATA."
        )
    return [find(name, options.scale) for name in wanted]


def _results(options: Namespace) -> Iterator[ExperimentRun]:
    """One experiment after the other; each result is written at once."""
    from intertwine.lab.papers.experiments import reproduce
    from intertwine.lab.zoo.precision import find_device

    plans, device = _plans(options), find_device(options.device)
    with output.exclusive_folder(options.out), output.progress("reading the plans") as step:
        for number, plan in enumerate(plans):
            done = number / len(plans)
            result = reproduce(
                plan, folder=options.out, data=options.data_folder, device=device,
                progress=lambda doing, name=plan.name, part=done: step(f"{name}: {doing}", part),
            )  # fmt: skip
            name, results = f"{plan.name}.{plan.scale}", Path(options.results or options.out)
            file = results if results.suffix == FILE else results / f"{name}{FILE}"
            figure = Path(options.plot or Path(options.out) / f"{name}.svg")
            yield ExperimentRun(result, result.save(file), result.plot(figure))


def _drawn(options: Namespace) -> ExperimentRun:
    """A result that was written before; its figure goes beside it unless --plot says otherwise."""
    from intertwine.lab.papers.experiments import read_result

    if options.names:
        raise InputError(f"--draw runs nothing, but {', '.join(options.names)} is named. Leave one of them out.")
    file = Path(options.draw)
    result = read_result(file)
    try:
        result.lines(), result.claims()
        return ExperimentRun(result, file, result.plot(options.plot or file.with_suffix(".svg")))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:  # the file may come from anywhere
        raise InputError(
            f"{file} cannot be drawn: its rows are not those of its experiment ({type(error).__name__}: {error}). "
            f"Copy it again if it was damaged, or run `{result.manifest.get('command', 'intertwine reproduce NAME')}`."
        ) from error


# -- A result in the terminal ------------------------------------------------------------------------------------------


def experiment_summary(result: ExperimentResult) -> Group:
    """One experiment: its title, numbers, claims and notes."""
    from rich.console import Group

    plan, manifest = result.plan, result.manifest
    printed = result.lines()
    marks = {True: ("✓ ", "green"), False: ("✗ ", "yellow"), None: ("· ", "dim")}
    series = dict.fromkeys(line.series for line in printed if line.verdict in ("differs", "no interval"))
    notes = dict.fromkeys(plan["notes"].get(name) or plan["notes"].get("all") for name in series)
    return Group(
        output.text((plan["title"], "bold"), f" · scale {plan['scale']}"),
        output.text(f"{manifest['device']}, {output.duration(manifest['seconds'])}", style="dim"),
        comparison_table(printed, plan["unit"]) if printed else measured_table(result),
        *(output.text(marks[claim.holds], f"{claim.says}: {claim.seen}") for claim in result.claims()),
        *(output.text(note, style="dim") for note in notes if note),
    )


def comparison_table(printed: Sequence[PrintedNumber], unit: str) -> Table:
    """Every printed number, ours and the verdict."""
    named = [f"{name}, {unit}" if unit else name for name in ("printed", "ours")]
    rows = output.table("series", "place", *named, "difference", "n", "verdict", left=("series", "place", "verdict"))
    for line in printed:
        rows.add_row(
            line.series, line.label, format_number(line.printed, line.printed_spread),
            format_number(line.mean, line.spread), "" if line.difference is None else f"{line.difference:+.3g}",
            str(line.count), output.text(line.verdict, style=COLOURS[line.verdict]),
        )  # fmt: skip
    return rows


def measured_table(result: ExperimentResult) -> Table:
    """Our numbers alone, where the paper prints none."""
    from intertwine.lab.papers.experiments import count, summary

    unit = result.plan["unit"]
    rows = output.table("series", "place", f"ours, {unit}" if unit else "ours", "n", left=("series", "place"))
    for series, places in result.numbers.items():
        for label, values in places.items():
            rows.add_row(series, label, format_number(*summary(values)), str(count(values)))
    return rows


def format_number(mean: float | None, spread: float | None) -> str:
    """A number and its deviation.

    >>> format_number(82.7224, 0.2938), format_number(0.5, None), format_number(None, None)
    ('82.72 ± 0.29', '0.5', '')
    """
    if mean is None:
        return ""
    return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"


# -- The list of experiments -------------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    from intertwine.lab.papers.experiments import find, names

    entries = [_entry(find(name), find(name, "cpu")) for name in names()]
    if as_json:
        output.print_json({"experiments": entries})
    else:
        output.terminal().print(experiment_table(entries))


def _entry(plan: ExperimentPlan, small: ExperimentPlan) -> dict[str, Any]:
    """One experiment of the list as plain data."""
    from intertwine.lab.papers import plan as plans
    from intertwine.lab.papers.experiments import plans_folder

    results = plans_folder() / "results"
    measured = [scale for scale in plans.SCALES if (results / f"{plan.name}.{scale}.json").is_file()]
    large = [*_data(plan), *(["a GPU"] if plan.networks or plan.data else [])]
    needs = {"paper": large, "gpu": large, "cpu": _data(small)}
    about = {"name": plan.name, "rows": list(plan.rows), "title": plan.title}
    return about | {"needs": needs, "cost": dict(plan.cost), "results": measured}


def _data(plan: ExperimentPlan) -> list[str]:
    """The data set of a plan, and the published networks that it uses."""
    published = plan.networks.published if plan.networks is not None else None
    return [*([plan.data.name] if plan.data else []), *([f"networks {published}"] if published else [])]


def experiment_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """All experiments: their titles, needs and costs at each scale, and whether a result came with the project."""
    heads = ("name", "what", "scale", "needs", "cost", "result")
    rows = output.table(*heads, left=heads, overflow="fold")
    for entry in entries:
        for place, (scale, needs) in enumerate(entry["needs"].items()):
            what = (entry["title"], f"rows {', '.join(entry['rows'])}", "")[place]
            stored = "yes" if scale in entry["results"] else ""
            cells = (", ".join(needs) or "nothing", entry["cost"].get(scale, ""), stored)
            rows.add_row("" if place else entry["name"], what, scale, *cells)
    return rows
