"""`intertwine fold MODEL`: features that are nearly the same merged into one; a smaller network and what it costs."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from intertwine.commands import show
from intertwine.commands.networks import Images, load_networks, need_data, read_images
from intertwine.commands.out_folder import held
from intertwine.commands.pictures import save_picture
from intertwine.connect.merged import scored
from intertwine.connect.statistics import batch_norms, reset_statistics
from intertwine.errors import InputError
from intertwine.fold.complexity import Complexity, complexity
from intertwine.fold.costs import Change
from intertwine.fold.fold import fold
from intertwine.fold.folded import Fold
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, Beta, Options
from intertwine.fold.sites import RULES
from intertwine.models import Loaded
from intertwine.models.folded import save_folded

PRESETS: Mapping[str | None, Mapping[str, Any]] = {None: {}, "printed": PRINTED, "paper-code": PAPER_CODE}
#: The picture in --out.
PICTURE = "complexity.svg"
#: Layers that are not folded up to which each is told; --json and --out have all.
MOST = 8


@dataclass(frozen=True)
class Told:
    """Everything there is to say about one folding. `scores`: name of the network → share of right answers, or None."""

    loaded: Loaded
    settings: Mapping[str, Any]
    folded: Fold
    features: Complexity
    latency: Change
    scores: Mapping[str, float | None]
    images: Images | None

    def about(self) -> dict[str, Any]:
        """All but what `Fold.to_dict` says, as plain data."""
        return {
            "model": self.loaded.name, "inputs": list(self.loaded.inputs), "options": dict(self.settings),
            "latency": self.latency.to_dict(), "complexity": self.features.to_dict(),
            "dataset": None if self.images is None else self.images.name, "accuracy": dict(self.scores),
        }  # fmt: skip


def run(options: Namespace) -> int:
    """Carry out the command."""
    settings = _settings(options)
    if options.reset and options.data is None:
        need_data("--reset measures BatchNorm statistics on data")
    with held(options.out), Console(stderr=True).status(f"building {options.model}") as status:
        images = read_images(options, [options.model])
        (loaded,) = load_networks([options.model], [options.weights], options.input, images)
        if options.reset and not batch_norms(loaded.model):
            raise InputError(
                f"--reset was given, but {loaded.name} has no BatchNorm with running statistics. Leave it out."
            )
        status.update("folding")
        folded = _folded(loaded, settings)
        status.update("counting different features")
        plain = {name: value for name, value in settings.items() if name != "max_ratio"}
        features = complexity(loaded.model, *loaded.args, **plain, **loaded.kwargs)
        status.update("timing and scoring")
        scores, folded = _scores(options, loaded, folded, images)
        told = Told(loaded, settings, folded, features, folded.latency(), scores, images)
        wrote = _write(options, told) if options.out else []
    if options.json:
        found = told.about() | folded.to_dict() | {"out": options.out}
        sys.stdout.write(json.dumps(found, allow_nan=False) + "\n")
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        show.terminal().print(show.spaced(*_shown(told), *files))
    return 0


def _folded(loaded: Loaded, settings: Mapping[str, Any]) -> Fold:
    """The one place that decides how much is merged: so far by beta."""
    return fold(loaded.model, *loaded.args, **settings, **loaded.kwargs)


def _scores(
    options: Namespace, loaded: Loaded, folded: Fold, images: Images | None
) -> tuple[dict[str, float | None], Fold]:
    """Accuracies, and the fold whose network is to be kept."""
    networks = {"before": loaded.model, "after": folded.model}
    if images is None:
        return {}, folded
    if options.reset:
        folded = replace(folded, model=reset_statistics(folded.model, images.train).eval())
        networks["after, statistics reset"] = folded.model
    found = [scored({name: network}, images.test, None)[0] for name, network in networks.items()]
    return {score.name: None if score.error is None else 1 - score.error for score in found}, folded


# -- what was asked ----------------------------------------------------------------------------------------------------


def _settings(options: Namespace) -> dict[str, Any]:
    """The options of `fold`: those of the preset, and over them those that were written; refused at once if wrong."""
    names = (*CHOICES, "bias", "max_ratio")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings: dict[str, Any] = {"beta": _beta(options.beta or ["0.1"]), **PRESETS[options.preset], **given}
    Options(**settings)
    return settings


def _beta(texts: list[str]) -> Beta:
    """`0.1`, or `conv1=0.2` once for every layer.

    >>> _beta(["0.2"]), _beta(["conv1=0.2", "conv2=0.1"])
    (0.2, {'conv1': 0.2, 'conv2': 0.1})
    """
    pairs = [text.rpartition("=")[::2] for text in texts]
    try:
        betas = {name: float(number) for name, number in pairs}
    except ValueError as error:
        raise InputError(
            f"--beta {' '.join(texts)} was asked for. Write a number such as 0.1, or LAYER=NUMBER for one layer."
        ) from error
    if len(betas) < len(texts) or ("" in betas and len(betas) > 1):
        raise InputError(
            f"--beta was given {len(texts)} times ({' '.join(texts)}). Give one number for all layers, or LAYER=NUMBER "
            "once for each."
        )
    return betas.get("", betas)


# -- what is written ---------------------------------------------------------------------------------------------------


def _write(options: Namespace, told: Told) -> list[Path]:
    """The network, the account, and a picture where there is something to draw."""
    folder = Path(options.out)
    inputs = options.input or ([] if told.images is None else ["x".join(map(str, (1, *told.images.shape)))])
    files = list(save_folded(folder, told.folded, options.model, inputs, told.about()))
    if told.features.layers:
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
        before, *after = ("–" if share is None else f"{share:.2%}" for share in told.scores.values())
        for name, share in zip([*told.scores][1:], after, strict=True):
            reset = name.removeprefix("after")
            table.add_row(f"accuracy on {told.images.name}{reset}", before, share, "")
    return table


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"


def _layers(told: Told) -> Table:
    """One line per layer that can be folded."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("layer", "features", "dead", "left", "merged by"):
        table.add_column(name, justify="left" if name in ("layer", "merged by") else "right")
    dead = {layer.name: layer.dead for layer in told.features.layers}
    for name, width in told.folded.widths.items():
        rule = RULES[told.folded.rules[name]]
        table.add_row(name, str(width.before), str(dead[name]), str(width.after), rule)
    return table


def _skipped(folded: Fold) -> list[Text]:
    """What was not folded, by reason."""
    if not folded.skipped:
        return []
    lines = [Text.assemble(f"not folded: {s.what}: ", (s.reason, "dim")) for s in folded.skipped[:MOST]]
    if len(folded.skipped) > MOST:
        lines.append(Text(f"and {len(folded.skipped) - MOST} more (--json has all)", "dim"))
    return [Text("\n").join(lines)]
