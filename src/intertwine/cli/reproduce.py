"""`intertwine reproduce NAME …`: runs experiments of the papers and shows their numbers beside the printed ones."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import add_device, add_json
from intertwine.cli.output import check_picture, duration, exclusive_folder, print_json, progress, spaced, terminal
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    from intertwine.lab.papers.experiments import ExperimentResult, PrintedNumber
    from intertwine.lab.papers.plan import ExperimentPlan

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine reproduce`.


SCALES = ("paper", "gpu", "cpu")


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Carry out experiments of the papers and show their numbers beside the printed ones. Networks and what was "
        "found are kept in the folder; a run that was stopped goes on when the same command is given again."
    )
    command.add_argument(
        "names", metavar="NAME", nargs="*", help="of experiments, see --list; or all, or a plan's file"
    )
    command.add_argument(
        "--scale", choices=SCALES, default="paper",
        help="as printed (default), minutes on one GPU, or seconds on digits to see that it works",
    )  # fmt: skip
    command.add_argument("--list", action="store_true", help="show all experiments, what they need and what they cost")
    command.add_argument(
        "--out", metavar="DIR", default="out/reproduce", help="of networks, results and figures (default out/reproduce)"
    )
    command.add_argument("--results", metavar="PATH", help="a folder for result files, or the file of one experiment")
    command.add_argument("--data-folder", metavar="DIR", help="where data sets are (default: INTERTWINE_DATA)")
    add_device(command)
    command.add_argument("--plot", metavar="FILE", help="the figure of one experiment, .svg or .png")
    command.add_argument("--draw", metavar="RESULT", help="run nothing: show and draw a result that was written before")
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# Results of experiments in the terminal: printed numbers beside ours, what the paper says in words, and the list.


COLOURS = {"agrees": "green", "differs": "yellow", "no value": "dim", "no interval": "dim"}


def experiment_summary(result: ExperimentResult) -> Group:
    """One experiment: what it is, its numbers, its claims."""
    from rich.console import Group
    from rich.text import Text

    plan, manifest = result.plan, result.manifest
    head = Text.assemble((plan["title"], "bold"), f" · scale {plan['scale']}")
    how = Text(f"{manifest['device']}, {duration(manifest['seconds'])}", style="dim")
    lines = result.lines()
    parts = [head, how, comparison_table(lines, plan["unit"]) if lines else measured_table(result)]
    return Group(*parts, *_claims(result), *_notes(plan, lines))


def comparison_table(lines: Sequence[PrintedNumber], unit: str) -> Table:
    """Every printed number, ours and the verdict."""
    from rich.text import Text

    table = _table("series", "place", *(f"{name}, {unit}" if unit else name for name in ("printed", "ours")))
    for head in ("difference", "n"):
        table.add_column(head, justify="right")
    table.add_column("verdict")
    for line in lines:
        difference = "" if line.difference is None else f"{line.difference:+.3g}"
        cells = (
            format_number(line.printed, line.printed_spread),
            format_number(line.mean, line.spread),
            difference,
            str(line.count),
        )
        table.add_row(line.series, line.label, *cells, Text(line.verdict, style=COLOURS[line.verdict]))
    return table


def measured_table(result: ExperimentResult) -> Table:
    """Our numbers alone, where nothing was printed that they could be compared with."""
    from intertwine.lab.papers.experiments import count, summary

    unit = result.plan["unit"]
    table = _table("series", "place", f"ours, {unit}" if unit else "ours", "n")
    for series, places in result.numbers.items():
        for label, values in places.items():
            table.add_row(series, label, format_number(*summary(values)), str(count(values)))
    return table


def format_number(mean: float | None, spread: float | None) -> str:
    """A number and its deviation, as they are written.

    >>> format_number(82.7224, 0.2938), format_number(0.5, None), format_number(None, None)
    ('82.72 ± 0.29', '0.5', '')
    """
    if mean is None:
        return ""
    return f"{mean:.4g}" if spread is None else f"{mean:.4g} ± {spread:.2g}"


def _table(*heads: str) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in heads:
        table.add_column(head, justify="left" if head in ("series", "place") else "right")
    return table


def _claims(result: ExperimentResult) -> list[Text]:
    from rich.text import Text

    marks = {True: ("✓ ", "green"), False: ("✗ ", "yellow"), None: ("· ", "dim")}
    return [Text.assemble(marks[claim.holds], f"{claim.says}: {claim.seen}") for claim in result.claims()]


def _notes(plan: Mapping[str, Any], lines: Sequence[PrintedNumber]) -> list[Text]:
    """The explanations of series that differ, each once."""
    from rich.text import Text

    series = dict.fromkeys(line.series for line in lines if line.verdict in ("differs", "no interval"))
    notes = dict.fromkeys(plan["notes"].get(name) or plan["notes"].get("all") for name in series)
    return [Text(note, style="dim") for note in notes if note]


def experiment_table(entries: Sequence[Mapping[str, Any]]) -> Table:
    """All experiments: what they are, what each scale needs and costs, and which results came with the project."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for head in ("name", "what", "scale", "needs", "cost", "result"):
        table.add_column(head, overflow="fold")
    for entry in entries:
        for place, (scale, needs) in enumerate(entry["needs"].items()):
            what = (entry["title"], f"rows {', '.join(entry['rows'])}", "")[place]
            there = "yes" if scale in entry["results"] else ""
            cells = (", ".join(needs) or "nothing", entry["cost"].get(scale, ""), there)
            table.add_row("" if place else entry["name"], what, scale, *cells)
    return table


# ----------------------------------------------------------------------------------------------------
# `intertwine reproduce NAME …`: experiments of the papers carried out, and their numbers beside the printed ones.


ALL = "all"
#: How the name of a result file ends; any other is a folder.
FILE = ".json"


@dataclass(frozen=True)
class ExperimentRun:
    """A result, and where it and its figure were written."""

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
    from rich.text import Text

    check_picture(options.plot)
    if options.list:
        _list(options.json)
        return 0
    done = [_drawn(options)] if options.draw else list(_carried_out(options))
    if options.json:
        print_json({"experiments": [one.to_dict() for one in done]})
    else:
        parts = [experiment_summary(one.result) for one in done]
        terminal().print(spaced(*parts))
        for one in done:
            words = f"{one.result.plan['name']}: result in {one.file}, figure in {one.figure}"
            terminal().print(Text(words))  # as text: a folder's name may hold brackets
    return 0


# -- what is asked for -------------------------------------------------------------------------------------------------


def _plans(options: Namespace) -> list[ExperimentPlan]:
    """All plans, read before anything is run."""
    from intertwine.lab.papers.experiments import find, names

    if not options.names:
        raise InputError("No experiment was asked for. Give names, or all; --list shows what there is.")
    asked = names() if ALL in options.names else list(dict.fromkeys(options.names))
    if len(asked) > 1 and (options.plot or Path(options.results or "").suffix == FILE):
        given = "--plot" if options.plot else "--results"
        raise InputError(
            f"{given} names one file, but {len(asked)} experiments were asked for. Give folders or one name."
        )
    if options.data_folder and not Path(options.data_folder).is_dir():
        raise InputError(
            f"Data sets were to be read from {options.data_folder}, which is not a folder. Give --data-folder the one "
            "that holds them, or leave it out to use INTERTWINE_DATA."
        )
    return [find(name, options.scale) for name in asked]


def _places(options: Namespace, name: str, scale: str) -> tuple[Path, Path]:
    """Where a result and its figure go."""
    own, results = f"{name}.{scale}", Path(options.results or options.out)
    file = results if results.suffix == FILE else results / f"{own}{FILE}"
    return file, Path(options.plot or Path(options.out) / f"{own}.svg")


# -- carrying out ------------------------------------------------------------------------------------------------------


def _carried_out(options: Namespace) -> Iterator[ExperimentRun]:
    """One experiment after the other; each is written when it is done."""
    from intertwine.lab.papers.experiments import reproduce
    from intertwine.lab.zoo.precision import find_device

    plans, device = _plans(options), find_device(options.device)
    with exclusive_folder(options.out), progress("reading the plans") as tell:
        for number, plan in enumerate(plans):
            behind = number / len(plans)
            result = reproduce(
                plan, folder=options.out, data=options.data_folder, device=device,
                tell=lambda doing, name=plan.name, part=behind: tell(f"{name}: {doing}", part),
            )  # fmt: skip
            file, figure = _places(options, plan.name, plan.scale)
            yield ExperimentRun(result, result.save(file), result.plot(figure))


def _drawn(options: Namespace) -> ExperimentRun:
    """A result of before, and its figure beside it where no other place is given."""
    from intertwine.lab.papers.experiments import read_result

    if options.names:
        raise InputError(f"--draw runs nothing, but {', '.join(options.names)} was asked for. Leave out one of them.")
    file = Path(options.draw)
    result = read_result(file)
    try:
        result.lines(), result.claims()
        return ExperimentRun(result, file, result.plot(options.plot or file.with_suffix(".svg")))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:  # it is somebody's file
        raise InputError(
            f"{file} could not be drawn: its rows are not those of its experiment ({type(error).__name__}: {error}). "
            f"Copy it again if it was damaged, or run `{result.manifest.get('command', 'intertwine reproduce NAME')}`."
        ) from error


# -- the list ----------------------------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    from intertwine.lab.papers.experiments import find, names

    entries = [_entry(find(name), find(name, "cpu")) for name in names()]
    if as_json:
        print_json({"experiments": entries})
    else:
        terminal().print(experiment_table(entries))


def _entry(plan: ExperimentPlan, small: ExperimentPlan) -> dict[str, Any]:
    """What the list says of an experiment."""
    from intertwine.lab.papers.experiments import plans_folder
    from intertwine.lab.papers.plan import SCALES as SCALES_plan

    results = plans_folder() / "results"
    measured = [scale for scale in SCALES_plan if (results / f"{plan.name}.{scale}.json").is_file()]
    large = [*_data(plan), *(["a GPU"] if plan.networks or plan.data else [])]
    needs = {"paper": large, "gpu": large, "cpu": _data(small)}
    about = {"name": plan.name, "rows": list(plan.rows), "title": plan.title}
    return about | {"needs": needs, "cost": dict(plan.cost), "results": measured}


def _data(plan: ExperimentPlan) -> list[str]:
    """The data set of a plan, and the networks of others that it looks at."""
    published = plan.networks.published if plan.networks is not None else None
    return [*([plan.data.name] if plan.data else []), *([f"networks {published}"] if published else [])]
