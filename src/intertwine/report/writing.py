"""`report.write`: the results of a study as one HTML file; from its folder, from what `study.run` gave, or a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from intertwine.report.outline import outline
from intertwine.report.page import wires
from intertwine.report.study.page import write_study
from intertwine.study.plan import Plan, plan_of
from intertwine.study.running import Study
from intertwine.study.store import Store
from intertwine.study.workbench import Workbench
from intertwine.study.zoos import place_of
from intertwine.symmetry.symmetry import symmetry
from intertwine.zoo.manifest import FILE as MANIFEST
from intertwine.zoo.manifest import read_manifest


def write(results: Study | str | Path | Any, path: str | Path) -> Path:
    """Write a report that opens from disk, without a network.

    Args:
        results: what `study.run` gave, the folder of a study, or a data frame of results. path: of the HTML file.

    Raises:
        InputError: the folder holds no study, or the file cannot be written.

    Example:
        >>> import tempfile, intertwine as it
        >>> zoo = {"architecture": "mlp", "data": "digits", "seeds": "0:2", "epochs": 2}
        >>> plan = {"name": "small", "zoos": {"z": zoo}, "parts": [{"verb": "accuracy"}]}
        >>> folder = tempfile.mkdtemp()
        >>> it.report.write(it.study.run(plan, out=folder + "/small"), folder + "/report.html").name
        'report.html'
    """
    if not isinstance(results, Study | str | Path):
        return write_study(results, path)
    folder = results.folder if isinstance(results, Study) else Path(results)
    store = Store.existing(folder)
    networks = _networks(plan_of(store.plan), folder)
    return write_study(store.frame(), path, plan=store.plan, networks=networks, failures=store.errors())


def _networks(plan: Plan, folder: Path) -> dict[str, str]:
    """The wires of every architecture; a zoo whose networks are no longer there is left out."""
    found = {}
    for name, zoo in plan.zoos.items():
        place = place_of(name, zoo, folder)
        records = read_manifest(place).records if (place / MANIFEST).exists() else ()
        if records:
            bench = Workbench({name: str(place)})
            network = bench.network(name, records[0].seed)
            found[name] = wires(outline(symmetry(network, bench.example(name, network)).wires))
    return found
