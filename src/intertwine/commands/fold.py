"""`intertwine fold MODEL`: features that are nearly the same merged into one; a smaller network and what it costs."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.document import print_json
from intertwine.commands.fold_ways import Folded, way_of
from intertwine.commands.networks import Images, load_networks, need_batch_norm, need_data, read_images
from intertwine.commands.out_folder import held
from intertwine.commands.pictures import save_picture
from intertwine.commands.progress import progress, within
from intertwine.connect.merged import scored
from intertwine.connect.statistics import reset_statistics
from intertwine.fold.complexity import Complexity
from intertwine.fold.costs import Change
from intertwine.fold.folded import Fold
from intertwine.fold.sites import RULES
from intertwine.models import Loaded
from intertwine.models.folded import save_folded

#: The picture in --out.
PICTURE = "complexity.svg"
#: Layers that are not folded up to which each is told; --json and --out have all.
MOST = 8


@dataclass(frozen=True)
class Told:
    """Everything there is to say about one folding.

    `features`: None where features were absorbed, which says nothing about which are the same. `scores`: name of the
    network → share of right answers, or None. `held_out`: see `Folded`.
    """

    loaded: Loaded
    settings: Mapping[str, Any]
    folded: Fold
    features: Complexity | None
    latency: Change
    scores: Mapping[str, float | None]
    images: Images | None
    held_out: Mapping[str, float | int | None] | None

    def about(self) -> dict[str, Any]:
        """All but what `Fold.to_dict` says, as plain data."""
        return {
            "model": self.loaded.name, "inputs": list(self.loaded.inputs), "options": dict(self.settings),
            "latency": self.latency.to_dict(), "complexity": None if self.features is None else self.features.to_dict(),
            "dataset": None if self.images is None else self.images.name, "accuracy": dict(self.scores),
            "held_out": None if self.held_out is None else dict(self.held_out),
        }  # fmt: skip


def run(options: Namespace) -> int:
    """Carry out the command."""
    if options.reset and options.data is None:
        need_data("--reset measures BatchNorm statistics on data")
    way = way_of(options)
    with held(options.out), progress(f"building {options.model}") as tell:
        images = read_images(options, [options.model])
        (loaded,) = load_networks([options.model], [options.weights], options.input, images)
        if options.reset:
            need_batch_norm(loaded)
        tell("folding", 0.1)
        found = way(loaded, images, within(tell, 0.1, 0.8))
        tell("counting different features", 0.8)
        features = _features(found.fold, way.settings)
        tell("timing and scoring", 0.9)
        scores, folded = _scores(options, loaded, found, images)
        told = Told(loaded, way.settings, folded, features, folded.latency(), scores, images, found.held_out)
        wrote = _write(options, told) if options.out else []
    if options.json:
        account = told.about() | folded.to_dict() | {"out": options.out}
        print_json(account)
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        show.terminal().print(show.spaced(*_shown(told), *files))
    return 0


def _features(folded: Fold, settings: Mapping[str, Any]) -> Complexity | None:
    """How many features are different, by what was merged."""
    if "absorbed" in folded.rules.values():
        return None
    found = Complexity.of(folded, norm=settings.get("norm", "fold"))
    return replace(found, beta=settings.get("beta", found.beta))


def _scores(
    options: Namespace, loaded: Loaded, found: Folded, images: Images | None
) -> tuple[dict[str, float | None], Fold]:
    """Accuracies, and the fold whose network is to be kept."""
    folded = found.fold
    if images is None:
        return {}, folded
    reset = "after, statistics reset"
    networks = {"before": loaded.model, reset if found.reset else "after": folded.model}
    if options.reset and not found.reset:
        folded = replace(folded, model=reset_statistics(folded.model, found.seen).eval())
        networks[reset] = folded.model
    results = [scored({name: network}, images.test, None)[0] for name, network in networks.items()]
    return {score.name: None if score.error is None else 1 - score.error for score in results}, folded


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(options: Namespace, told: Told) -> list[Path]:
    """The network, the account, and a picture where there is something to draw."""
    folder = Path(options.out)
    inputs = options.input or ([] if told.images is None else ["x".join(map(str, (1, *told.images.shape)))])
    files = list(save_folded(folder, told.folded, options.model, inputs, told.about()))
    if told.features is not None and told.features.layers:
        save_picture(told.features.plot(), str(folder / PICTURE))
        files.append(folder / PICTURE)
    return files


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _shown(told: Told) -> list[Text | Table]:
    folded = told.folded
    head = Text(f"{told.loaded.name} folded", style="bold")
    if not folded.groups:
        head.append("\nnothing to fold: no layer has features that may be merged", "yellow")
    elif not folded.removed:
        head.append("\nnothing was merged: no two features are near enough; a larger --beta merges more", "yellow")
    return [head, _costs(told), *([_layers(told)] if folded.groups else []), *_skipped(folded)]


def _costs(told: Told) -> Table:
    """Before and after, a line each."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("", "before", "after", "left"):
        table.add_column(name, justify="right" if name else "left")
    for name, change in (("parameters", told.folded.parameters), ("FLOPs", told.folded.flops)):
        table.add_row(name, f"{change.before:,}", f"{change.after:,}", f"{change.share:.1%}")
    times = told.latency
    table.add_row("time of a forward", f"{_ms(times.before)}", f"{_ms(times.after)}", f"{times.share:.1%}")
    if told.images is not None:
        before, *after = map(_percent, told.scores.values())
        for name, share in zip([*told.scores][1:], after, strict=True):
            reset = name.removeprefix("after")
            table.add_row(f"accuracy on {told.images.name}{reset}", before, share, "")
    if told.held_out is not None:
        count, *shares = told.held_out.values()
        table.add_row(f"accuracy on {count} training images set apart", *map(_percent, shares), "")
    return table


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.2%}"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _layers(told: Told) -> Table:
    """One line per layer that can be folded."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    dead = None if told.features is None else {layer.name: str(layer.dead) for layer in told.features.layers}
    betas = told.folded.betas
    heads = ("layer", "features", *(["dead"] if dead else []), "left", *(["beta"] if betas else []), "how")
    for name in heads:
        table.add_column(name, justify="left" if name in ("layer", "how") else "right")
    for name, width in told.folded.widths.items():
        cells = [name, str(width.before), *([dead[name]] if dead else []), str(width.after)]
        table.add_row(*cells, *([f"{betas[name]:.3g}"] if betas else []), RULES[told.folded.rules[name]])
    return table


def _skipped(folded: Fold) -> list[Text]:
    """What was not folded, by reason."""
    if not folded.skipped:
        return []
    lines = [Text.assemble(f"not folded: {s.what}: ", (s.reason, "dim")) for s in folded.skipped[:MOST]]
    if len(folded.skipped) > MOST:
        lines.append(Text(f"and {len(folded.skipped) - MOST} more (--json has all)", "dim"))
    return [Text("\n").join(lines)]
