"""`intertwine fold MODEL`: a smaller network by merging or removing features, and what it costs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli.arguments import ZOO, add_data, add_json, add_model, number
from intertwine.cli.networks import (
    ImageSplits,
    load_networks,
    read_images,
    require_batch_norm,
    require_data,
    split_training_images,
)
from intertwine.cli.output import (
    ReportProgress,
    exclusive_folder,
    print_json,
    progress,
    save_picture,
    spaced,
    subprogress,
    terminal,
)
from intertwine.errors import InputError
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, Options

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intertwine.checkpoints.load import Loaded
    from intertwine.fold.complexity import Complexity
    from intertwine.fold.result import Fold, Reduction
    from intertwine.lab.zoo.datasets.dataset import Batches

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine fold`.


#: What the options of `fold` that are a choice of words decide.
WORDS = {
    "schedule": "one layer after the other, or one merge per layer and sweep",
    "terms": "distances look at incoming weights, or at outgoing ones too",
    "rows": "features are compared by what a merge changes in the layers behind; or by rows, those of a group by "
    "their mean, with larger groups farther apart (ward) or not (mean); or by sums of rows as printed",
    "maximum": "what beta is a share of: the usual distance of two features, the largest, or that at every step",
    "norm": "BatchNorm is taken into the layer before it, which is exact, or summed as the paper's code does",
}


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Merge the features of a network that are nearly the same, or take out those that others can express, without "
        "training; the result is a smaller network of the same kind. Say how much: by --beta, by --parameters, by "
        "--floor or by --widths. With --data, both networks are scored on test images." + ZOO
    )
    add_model(command)
    _add_how_far(command)
    _add_ways(command)
    _add_distances(command)
    add_data(command, "test images to score on, and at most so many training images for what looks at those")
    command.add_argument(
        "--reset",
        action="store_true",
        help="estimate the BatchNorm statistics of the smaller network again on training images, without labels; it "
        "is scored before and after",
    )
    command.add_argument(
        "--out",
        metavar="DIR",
        help="write the smaller network and the account; and a picture, unless features were absorbed",
    )
    add_json(command)


def _add_how_far(command: ArgumentParser) -> None:
    """A number of parameters, an accuracy, a width or a distance: one of them says where to stop."""
    command.add_argument(
        "--parameters",
        metavar="SHARE|NUMBER",
        type=number,
        help="fold to so many parameters, each layer as far as costs least: a share below 1, or a number",
    )
    command.add_argument(
        "--floor",
        metavar="ACCURACY",
        type=number,
        help="fold as far as this accuracy allows, such as 0.9. It is measured on half of the training images that "
        "--samples allows, never on test images; a network that has learnt them does better on them than on new ones",
    )
    command.add_argument(
        "--widths",
        metavar="SHARE",
        action="append",
        help="the share of its features that every layer keeps; LAYER=NUMBER for one layer, repeated for several",
    )
    command.add_argument(
        "--beta",
        metavar="B",
        action="append",
        help="a layer stops when its smallest distance exceeds B times the usual one; above 0, below 1, and the larger "
        "the more merges (default 0.1). LAYER=B for one layer; repeat it for several, all others are then left alone",
    )
    command.add_argument(
        "--max-ratio", metavar="R", type=number, help="the largest share of a layer's features that may go"
    )


def _add_ways(command: ArgumentParser) -> None:
    """How features go: absorbed by others, merged in pairs, in clusters, or by what they give on images."""
    command.add_argument(
        "--how",
        choices=("absorb", "merge"),
        help="with --parameters or --floor: take out features that others can express, which changes the layers that "
        "read them (absorb, the default), or merge pairs, each layer with a beta of its own (merge)",
    )
    command.add_argument(
        "--with-data",
        action="store_const",
        const=True,
        help="let absorb look at training images, without labels, instead of random ones; so it does in any case with "
        "--floor and --reset together",
    )
    command.add_argument(
        "--method",
        choices=("iterative", "kmeans", "activations"),
        help="how features are put together: the nearest two again and again (iterative, the default), in clusters of "
        "rows (kmeans, needs --widths), or by what they give on training images (activations, --beta or --widths)",
    )


def _add_distances(command: ArgumentParser) -> None:
    """What makes two features differ, where pairs are merged; the paper's choices have a name."""
    for name, known in CHOICES.items():
        command.add_argument(f"--{name}", choices=known, help=f"{WORDS[name]} (default {known[0]})")
    command.add_argument(
        "--no-bias", dest="bias", action="store_const", const=False, help="leave biases out of distances"
    )
    command.add_argument(
        "--preset",
        choices=("printed", "paper-code"),
        help="options of Chen, Zhou and Yan (2024): Algorithm 1 as printed, or what their code does; options that are "
        "given beside it count",
    )


# ----------------------------------------------------------------------------------------------------
# The ways in which `intertwine fold` makes a network smaller, and which options go with each.


PRESETS: Mapping[str | None, Mapping[str, Any]] = {None: {}, "printed": PRINTED, "paper-code": PAPER_CODE}
#: Ways by name → the options that go with them, and what asks for the way.
METHOD_OPTIONS = {
    "iterative": (("method", "beta", *CHOICES, "bias", "max_ratio", "preset"), "folding by --beta"),
    "sized": (("parameters", "floor", "how", "with_data"), "--parameters or --floor"),
    "kmeans": (("method", "widths"), "--method kmeans"),
    "activations": (("method", "beta", "widths"), "--method activations"),
}
#: How options are written that are not written as they are called.
FLAGS = {"bias": "--no-bias"}


@dataclass(frozen=True, eq=False)
class FoldingRun:
    """A folding. `seen`: training images that it, or a reset of statistics, may look at.

    `reset`: whether its BatchNorm statistics were reset already. `held_out`: how many images an accuracy was kept on,
    and the accuracies on them; None where there was none to keep.
    """

    fold: Fold
    seen: Batches | None
    reset: bool = False
    held_out: Mapping[str, float | int | None] | None = None


@dataclass(frozen=True)
class FoldMethod:
    """What was asked for: `settings` as they are told, and how to carry it out."""

    settings: Mapping[str, Any]
    carry_out: Callable[[Loaded, ImageSplits | None, ReportProgress], FoldingRun]

    def __call__(self, loaded: Loaded, images: ImageSplits | None, tell: ReportProgress) -> FoldingRun:
        return self.carry_out(loaded, images, tell)


def fold_method(options: Namespace) -> FoldMethod:
    """The way that the options ask for; those that do not go together, or need data, are refused."""
    sized = options.parameters is not None or options.floor is not None
    name = "sized" if sized else options.method or "iterative"
    _refuse_others(options, name)
    return {"iterative": _iterative, "sized": _sized, "kmeans": _kmeans, "activations": _activations}[name](options)


def _refuse_others(options: Namespace, way: str) -> None:
    allowed, asked_by = METHOD_OPTIONS[way]
    every = dict.fromkeys(option for names, _ in METHOD_OPTIONS.values() for option in names)
    for option in every:
        if getattr(options, option) is not None and option not in allowed:
            others = " and ".join(words for names, words in METHOD_OPTIONS.values() if option in names)
            flag = FLAGS.get(option, f"--{option.replace('_', '-')}")
            raise InputError(f"{flag} was given beside {asked_by}; it goes with {others}. Leave one of them out.")


# -- one function per way ----------------------------------------------------------------------------------------------


def _iterative(options: Namespace) -> FoldMethod:
    """The options of `fold`: those of the preset, and over them those that were written."""
    from intertwine.fold.fold import fold

    names = (*CHOICES, "bias", "max_ratio")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    beta = per_layer("--beta", options.beta or ["0.1"], float)
    settings: dict[str, Any] = {"beta": beta, **PRESETS[options.preset], **given}
    Options(**settings)

    def carry_out(loaded: Loaded, images: ImageSplits | None, tell: ReportProgress) -> FoldingRun:
        return FoldingRun(fold(loaded.model, *loaded.args, **settings, **loaded.kwargs), _train(images))

    return FoldMethod(settings, carry_out)


def _sized(options: Namespace) -> FoldMethod:
    """To a number of parameters, or to an accuracy on training images that are set apart."""
    from intertwine.fold.budget import fold_to
    from intertwine.stitch.scores import accuracy_of

    how, floor = options.how or "absorb", options.floor
    if options.parameters is not None and floor is not None:
        raise InputError("--parameters and --floor were both given. Leave one of them out: either decides the size.")
    if options.with_data and how == "merge":
        raise InputError("--with-data was given beside --how merge, which compares weights alone. Leave it out.")
    if options.data is None:
        if floor is not None:
            require_data("--floor is an accuracy on images")
        if options.with_data:
            require_data("--with-data looks at training images")
    reset = bool(options.reset) and floor is not None  # the search then wants the accuracy with statistics reset
    looks = bool(options.with_data) or (reset and how == "absorb")
    asked = {"parameters": options.parameters} if floor is None else {"floor": floor}

    def carry_out(loaded: Loaded, images: ImageSplits | None, tell: ReportProgress) -> FoldingRun:
        seen, held = (_train(images), None) if floor is None or images is None else split_training_images(images)
        found = fold_to(
            loaded.model, *loaded.args, **asked, held_out=held, how=how, data=seen if looks or reset else None,
            statistics="reset" if reset else "keep", progress=tell, **loaded.kwargs,
        )  # fmt: skip
        if held is None:
            return FoldingRun(found, seen)
        accuracies = {name: accuracy_of(m, held) for name, m in (("before", loaded.model), ("after", found.model))}
        return FoldingRun(found, seen, reset, {"images": len(held.dataset.test_labels), **accuracies})

    return FoldMethod({**asked, "how": how, "with_data": looks}, carry_out)


def _kmeans(options: Namespace) -> FoldMethod:
    from intertwine.fold.clustering import fold_kmeans

    if options.widths is None:
        raise InputError("--method kmeans needs to know how many features stay. Add --widths 0.5, or LAYER=NUMBER.")
    widths = _widths(options)

    def carry_out(loaded: Loaded, images: ImageSplits | None, tell: ReportProgress) -> FoldingRun:
        return FoldingRun(fold_kmeans(loaded.model, *loaded.args, widths=widths, **loaded.kwargs), _train(images))

    return FoldMethod({"method": "kmeans", "widths": widths}, carry_out)


def _activations(options: Namespace) -> FoldMethod:
    from intertwine.fold.clustering import fold_activations
    from intertwine.fold.fold import fold_groups

    if options.data is None:
        require_data("--method activations compares what features give on training images")
    if options.beta and options.widths:
        raise InputError("--beta and --widths were both given. Leave one of them out: either says when to stop.")
    if options.widths:
        limit = {"widths": _widths(options)}
    else:
        limit = {"beta": per_layer("--beta", options.beta or ["0.1"], float)}
        Options(**limit)

    def carry_out(loaded: Loaded, images: ImageSplits | None, tell: ReportProgress) -> FoldingRun:
        assert images is not None  # asked for above
        groups = fold_activations(loaded.model, images.train, **limit).groups
        # merged again on the inputs of the other ways, so that FLOPs and times are those of one image too
        return FoldingRun(fold_groups(loaded.model, *loaded.args, groups=groups, **loaded.kwargs), images.train)

    return FoldMethod({"method": "activations", **limit}, carry_out)


def _train(images: ImageSplits | None) -> Batches | None:
    return None if images is None else images.train


# -- numbers for layers ------------------------------------------------------------------------------------------------


def per_layer(flag: str, texts: list[str], number: Callable[[str], float | int]) -> Any:
    """`0.1`, or `conv1=0.2` once for every layer.

    >>> per_layer("--beta", ["0.2"], float), per_layer("--beta", ["conv1=0.2", "conv2=0.1"], float)
    (0.2, {'conv1': 0.2, 'conv2': 0.1})
    """
    pairs = [text.rpartition("=")[::2] for text in texts]
    try:
        found = {name: number(text) if name else float(text) for name, text in pairs}
    except ValueError as error:
        of = " for one layer" if number is float else ", a whole number of features, for one layer"
        raise InputError(
            f"{flag} {' '.join(texts)} was asked for. Write a number such as 0.1, or LAYER=NUMBER{of}."
        ) from error
    if len(found) < len(texts) or ("" in found and len(found) > 1):
        raise InputError(
            f"{flag} was given {len(texts)} times ({' '.join(texts)}). Give one number for all layers, or LAYER=NUMBER "
            "once for each."
        )
    return found.get("", found)


def _widths(options: Namespace) -> Any:
    from intertwine.fold.prepare import check_share

    widths = per_layer("--widths", options.widths, int)
    check_share(widths)
    return widths


# ----------------------------------------------------------------------------------------------------
# `intertwine fold MODEL`: features that are nearly the same merged into one; a smaller network and what it costs.


#: The picture in --out.
PICTURE = "complexity.svg"
#: Layers that are not folded up to which each is told; --json and --out have all.
MAX_SKIPPED_SHOWN = 8


@dataclass(frozen=True)
class FoldReport:
    """Everything there is to say about one folding.

    `features`: None where features were absorbed, which says nothing about which are the same. `scores`: name of the
    network → share of right answers, or None. `held_out`: see `FoldingRun`.
    """

    loaded: Loaded
    settings: Mapping[str, Any]
    folded: Fold
    features: Complexity | None
    latency: Reduction
    scores: Mapping[str, float | None]
    images: ImageSplits | None
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
    from rich.text import Text

    if options.reset and options.data is None:
        require_data("--reset measures BatchNorm statistics on data")
    way = fold_method(options)
    with exclusive_folder(options.out), progress(f"building {options.model}") as tell:
        images = read_images(options, [options.model])
        (loaded,) = load_networks([options.model], [options.weights], options.input, images)
        if options.reset:
            require_batch_norm(loaded)
        tell("folding", 0.1)
        found = way(loaded, images, subprogress(tell, 0.1, 0.8))
        tell("counting different features", 0.8)
        features = _features(found.fold, way.settings)
        tell("timing and scoring", 0.9)
        scores, folded = _scores(options, loaded, found, images)
        told = FoldReport(loaded, way.settings, folded, features, folded.latency(), scores, images, found.held_out)
        wrote = _write(options, told) if options.out else []
    if options.json:
        account = told.about() | folded.to_dict() | {"out": options.out}
        print_json(account)
    else:
        files = [Text("\n").join(Text(f"wrote {path}") for path in wrote)] if wrote else []
        terminal().print(spaced(*_shown(told), *files))
    return 0


def _features(folded: Fold, settings: Mapping[str, Any]) -> Complexity | None:
    """How many features are different, by what was merged."""
    from intertwine.fold.complexity import Complexity

    if "absorbed" in folded.rules.values():
        return None
    found = Complexity.of(folded, norm=settings.get("norm", "fold"))
    return replace(found, beta=settings.get("beta", found.beta))


def _scores(
    options: Namespace, loaded: Loaded, found: FoldingRun, images: ImageSplits | None
) -> tuple[dict[str, float | None], Fold]:
    """Accuracies, and the fold whose network is to be kept."""
    from intertwine.connect.merge import scored
    from intertwine.data.batchnorm import reset_statistics

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


def _write(options: Namespace, told: FoldReport) -> list[Path]:
    """The network, the account, and a picture where there is something to draw."""
    from intertwine.fold.result import save_folded

    folder = Path(options.out)
    inputs = options.input or ([] if told.images is None else ["x".join(map(str, (1, *told.images.shape)))])
    files = list(save_folded(folder, told.folded, options.model, inputs, told.about()))
    if told.features is not None and told.features.layers:
        save_picture(told.features.plot(), str(folder / PICTURE))
        files.append(folder / PICTURE)
    return files


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _shown(told: FoldReport) -> list[Text | Table]:
    from rich.text import Text

    folded = told.folded
    head = Text(f"{told.loaded.name} folded", style="bold")
    if not folded.groups:
        head.append("\nnothing to fold: no layer has features that may be merged", "yellow")
    elif not folded.removed:
        head.append("\nnothing was merged: no two features are near enough; a larger --beta merges more", "yellow")
    return [head, _costs(told), *([_layers(told)] if folded.groups else []), *_skipped(folded)]


def _costs(told: FoldReport) -> Table:
    """Before and after, a line each."""
    from rich.table import Table

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


def _layers(told: FoldReport) -> Table:
    """One line per layer that can be folded."""
    from rich.table import Table

    from intertwine.fold.prepare import RULES

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
    from rich.text import Text

    if not folded.skipped:
        return []
    lines = [Text.assemble(f"not folded: {s.what}: ", (s.reason, "dim")) for s in folded.skipped[:MAX_SKIPPED_SHOWN]]
    if len(folded.skipped) > MAX_SKIPPED_SHOWN:
        lines.append(Text(f"and {len(folded.skipped) - MAX_SKIPPED_SHOWN} more (--json has all)", "dim"))
    return [Text("\n").join(lines)]
