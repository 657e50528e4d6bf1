"""`intertwine reproduce NAME …`: experiments of the papers carried out, and their numbers beside the printed ones."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.text import Text

from intertwine.commands.document import print_json
from intertwine.commands.out_folder import held
from intertwine.commands.pictures import check_picture
from intertwine.commands.progress import progress
from intertwine.commands.reproduce_tables import listing, told
from intertwine.commands.show import spaced, terminal
from intertwine.errors import InputError
from intertwine.reproduce.experiments import Result, find, names, plans_folder, read_result, reproduce
from intertwine.reproduce.plan import SCALES, Plan
from intertwine.zoo.precision import find_device

ALL = "all"
#: How the name of a result file ends; any other is a folder.
FILE = ".json"


@dataclass(frozen=True)
class Done:
    """A result, and where it and its figure were written."""

    result: Result
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
    check_picture(options.plot)
    if options.list:
        _list(options.json)
        return 0
    done = [_drawn(options)] if options.draw else list(_carried_out(options))
    if options.json:
        print_json({"experiments": [one.to_dict() for one in done]})
    else:
        parts = [told(one.result) for one in done]
        terminal().print(spaced(*parts))
        for one in done:
            words = f"{one.result.plan['name']}: result in {one.file}, figure in {one.figure}"
            terminal().print(Text(words))  # as text: a folder's name may hold brackets
    return 0


# -- what is asked for -------------------------------------------------------------------------------------------------


def _plans(options: Namespace) -> list[Plan]:
    """All plans, read before anything is run."""
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


def _carried_out(options: Namespace) -> Iterator[Done]:
    """One experiment after the other; each is written when it is done."""
    plans, device = _plans(options), find_device(options.device)
    with held(options.out), progress("reading the plans") as tell:
        for number, plan in enumerate(plans):
            behind = number / len(plans)
            result = reproduce(
                plan, folder=options.out, data=options.data_folder, device=device,
                tell=lambda doing, name=plan.name, part=behind: tell(f"{name}: {doing}", part),
            )  # fmt: skip
            file, figure = _places(options, plan.name, plan.scale)
            yield Done(result, result.save(file), result.plot(figure))


def _drawn(options: Namespace) -> Done:
    """A result of before, and its figure beside it where no other place is given."""
    if options.names:
        raise InputError(f"--draw runs nothing, but {', '.join(options.names)} was asked for. Leave out one of them.")
    file = Path(options.draw)
    result = read_result(file)
    try:
        result.lines(), result.claims()
        return Done(result, file, result.plot(options.plot or file.with_suffix(".svg")))
    except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:  # it is somebody's file
        raise InputError(
            f"{file} could not be drawn: its rows are not those of its experiment ({type(error).__name__}: {error}). "
            f"Copy it again if it was damaged, or run `{result.manifest.get('command', 'intertwine reproduce NAME')}`."
        ) from error


# -- the list ----------------------------------------------------------------------------------------------------------


def _list(as_json: bool) -> None:
    entries = [_entry(find(name), find(name, "cpu")) for name in names()]
    if as_json:
        print_json({"experiments": entries})
    else:
        terminal().print(listing(entries))


def _entry(plan: Plan, small: Plan) -> dict[str, Any]:
    """What the list says of an experiment."""
    results = plans_folder() / "results"
    measured = [scale for scale in SCALES if (results / f"{plan.name}.{scale}.json").is_file()]
    large = [*_data(plan), *(["a GPU"] if plan.networks or plan.data else [])]
    needs = {"paper": large, "gpu": large, "cpu": _data(small)}
    about = {"name": plan.name, "rows": list(plan.rows), "title": plan.title}
    return about | {"needs": needs, "cost": dict(plan.cost), "results": measured}


def _data(plan: Plan) -> list[str]:
    """The data set of a plan, and the networks of others that it looks at."""
    published = plan.networks.published if plan.networks is not None else None
    return [*([plan.data.name] if plan.data else []), *([f"networks {published}"] if published else [])]
