"""`intertwine fold MODEL`: a smaller network by merging or removing features, and what it costs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from intertwine.cli import arguments, output
from intertwine.cli.networks import ImageSplits, load_networks, read_images, require_batch_norm, split_training_images
from intertwine.errors import InputError
from intertwine.fold.options import CHOICES, PAPER_CODE, PRINTED, Options

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from intertwine.checkpoints.load import Loaded
    from intertwine.fold.complexity import Complexity
    from intertwine.fold.result import Fold, Reduction
    from intertwine.lab.zoo.datasets.dataset import Batches

PRESETS: Mapping[str | None, Mapping[str, Any]] = {None: {}, "printed": PRINTED, "paper-code": PAPER_CODE}
#: Ways of folding → the options that belong to them, and the flag that chooses the way.
WAYS = {
    "iterative": (("method", "beta", *CHOICES, "bias", "max_ratio", "preset"), "folding by --beta"),
    "sized": (("parameters", "floor", "how", "with_data"), "--parameters or --floor"),
    "kmeans": (("method", "widths"), "--method kmeans"),
    "activations": (("method", "beta", "widths"), "--method activations"),
}
#: The picture in --out.
PICTURE = "complexity.svg"
#: Layers that are not folded up to which each is listed; --json and --out have all.
MAX_SKIPPED_SHOWN = 8


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Merge the features of a network that are nearly the same, or take out those that others can express, without "
        "training; the result is a smaller network of the same kind. Say how much: by --beta, by --parameters, by "
        "--floor or by --widths. With --data, both networks are scored on test images." + arguments.ZOO
    )
    arguments.add_model(command)
    command.add_argument(
        "--parameters", metavar="SHARE|NUMBER", type=arguments.number,
        help="fold to this many parameters, each layer as far as costs least: a share below 1, or a number",
    )  # fmt: skip
    command.add_argument(
        "--floor", metavar="ACCURACY", type=arguments.number,
        help="fold as far as this accuracy allows, such as 0.9. It is measured on half of the training images that "
        "--samples allows, never on test images; a network does better on its training images than on new ones",
    )  # fmt: skip
    command.add_argument(
        "--widths", metavar="SHARE", action="append",
        help="the share of its features that every layer keeps; LAYER=NUMBER for one layer, repeated for several",
    )  # fmt: skip
    command.add_argument(
        "--beta", metavar="B", action="append",
        help="a layer stops when its smallest distance exceeds B times the usual one; above 0, below 1, and the larger "
        "the more merges (default 0.1). LAYER=B for one layer; repeat it for several, all others are then left alone",
    )  # fmt: skip
    command.add_argument(
        "--max-ratio",
        metavar="R",
        type=arguments.number,
        help="the largest share of a layer's features that may be merged away",
    )
    command.add_argument(
        "--how", choices=("absorb", "merge"),
        help="with --parameters or --floor: take out features that others can express, which changes the layers that "
        "read them (absorb, the default), or merge pairs, each layer with a beta of its own (merge)",
    )  # fmt: skip
    command.add_argument(
        "--with-data", action="store_const", const=True,
        help="let absorb use training images, without labels, instead of random ones; --floor and --reset together "
        "imply it",
    )  # fmt: skip
    command.add_argument(
        "--method", choices=("iterative", "kmeans", "activations"),
        help="how features are grouped: the nearest two again and again (iterative, the default), in clusters of "
        "rows (kmeans, needs --widths), or by their activations on training images (activations, --beta or --widths)",
    )  # fmt: skip
    words = {
        "schedule": "one layer after the other, or one merge per layer and sweep",
        "terms": "distances of incoming weights, or of incoming and outgoing ones",
        "rows": "features are compared by what a merge changes in the layers behind; or by rows, those of a group by "
        "their mean, with larger groups farther apart (ward) or not (mean); or by sums of rows as printed",
        "maximum": "the reference of beta: the usual distance of two features, the largest, or that at every step",
        "norm": "BatchNorm is taken into the layer before it, which is exact, or summed as in the paper's code",
    }
    for name, known in CHOICES.items():
        command.add_argument(f"--{name}", choices=known, help=f"{words[name]} (default {known[0]})")
    command.add_argument(
        "--no-bias", dest="bias", action="store_const", const=False, help="leave biases out of distances"
    )
    command.add_argument(
        "--preset", choices=("printed", "paper-code"),
        help="options of Chen, Zhou and Yan (2024): Algorithm 1 as printed, or their code; explicit options override "
        "the preset",
    )  # fmt: skip
    arguments.add_data(command, "test images to score on, and at most this many training images where these are used")
    command.add_argument(
        "--reset", action="store_true",
        help="re-estimate the BatchNorm statistics of the smaller network on training images, without labels; it is "
        "scored before and after",
    )  # fmt: skip
    command.add_argument(
        "--out", metavar="DIR",
        help="write the smaller network and the results; and a picture, unless features were absorbed",
    )  # fmt: skip
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    if options.reset:
        arguments.require_data(options, "--reset measures BatchNorm statistics on data")
    method = fold_method(options)
    with output.exclusive_folder(options.out), output.progress(f"building {options.model}") as step:
        images = read_images(options, [options.model])
        (loaded,) = load_networks([options.model], [options.weights], options.input, images)
        if options.reset:
            require_batch_norm(loaded)
        step("folding", 0.1)
        found = method.run(loaded, images, output.subprogress(step, 0.1, 0.8))
        step("counting different features", 0.8)
        features = _features(found.fold, method.settings)
        step("timing and scoring", 0.9)
        scores, folded = _scores(options, loaded, found, images)
        report = FoldReport(loaded, method.settings, folded, features, folded.latency(), scores, images, found.held_out)
        files = _write(options, report) if options.out else []
    if options.json:
        output.print_json(report.to_dict() | folded.to_dict() | {"out": options.out})
    else:
        output.show(*_shown(report), output.wrote(*files))
    return 0


# -- The ways of folding -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class FoldingRun:
    """A folded network. `seen`: the training images that it, or a reset of statistics, may use.

    `reset`: whether its BatchNorm statistics are re-estimated already. `held_out`: the number of images on which an
    accuracy is kept, and the accuracies on them; None where there are none.
    """

    fold: Fold
    seen: Batches | None
    reset: bool = False
    held_out: Mapping[str, float | int | None] | None = None


@dataclass(frozen=True)
class FoldMethod:
    """A way of folding: its settings as they are reported, and the function that folds."""

    settings: Mapping[str, Any]
    run: Callable[[Loaded, ImageSplits | None, output.ProgressCallback], FoldingRun]


def fold_method(options: Namespace) -> FoldMethod:
    """The way of folding that the options choose; options that do not belong to it, or need data, are refused."""
    sized = options.parameters is not None or options.floor is not None
    way = "sized" if sized else options.method or "iterative"
    allowed, chosen_by = WAYS[way]
    for option in dict.fromkeys(option for names, _ in WAYS.values() for option in names):
        if option not in allowed and (flags := arguments.given_flags(options, [option])):
            others = " and ".join(words for names, words in WAYS.values() if option in names)
            raise InputError(f"{flags[0]} has no effect on {chosen_by}; it belongs to {others}. Leave one of them out.")
    return {"iterative": _iterative, "sized": _sized, "kmeans": _kmeans, "activations": _activations}[way](options)


def _iterative(options: Namespace) -> FoldMethod:
    """`fold` with the options of the preset, which explicit options override."""
    from intertwine.fold.fold import fold

    names = (*CHOICES, "bias", "max_ratio")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    settings: dict[str, Any] = {"beta": _beta(options), **PRESETS[options.preset], **given}
    Options(**settings)

    def run(loaded: Loaded, images: ImageSplits | None, progress: output.ProgressCallback) -> FoldingRun:
        return FoldingRun(fold(loaded.model, *loaded.args, **settings, **loaded.kwargs), _train(images))

    return FoldMethod(settings, run)


def _sized(options: Namespace) -> FoldMethod:
    """`fold_to`: to a number of parameters, or to an accuracy on held-out training images."""
    from intertwine.fold.budget import fold_to
    from intertwine.stitch.scores import accuracy_of

    how, floor = options.how or "absorb", options.floor
    arguments.refuse_together(options, "parameters", "floor", reason=": either decides the size")
    if options.with_data and how == "merge":
        raise InputError("--with-data has no effect on --how merge, which compares weights alone. Leave it out.")
    if floor is not None:
        arguments.require_data(options, "--floor is an accuracy on images")
    if options.with_data:
        arguments.require_data(options, "--with-data uses training images")
    reset = bool(options.reset) and floor is not None  # the search then measures the accuracy after the reset
    uses_data = bool(options.with_data) or (reset and how == "absorb")
    target = {"parameters": options.parameters} if floor is None else {"floor": floor}

    def run(loaded: Loaded, images: ImageSplits | None, progress: output.ProgressCallback) -> FoldingRun:
        seen, held = (_train(images), None) if floor is None or images is None else split_training_images(images)
        found = fold_to(
            loaded.model, *loaded.args, **target, held_out=held, how=how, data=seen if uses_data or reset else None,
            statistics="reset" if reset else "keep", progress=progress, **loaded.kwargs,
        )  # fmt: skip
        if held is None:
            return FoldingRun(found, seen)
        accuracies = {name: accuracy_of(m, held) for name, m in (("before", loaded.model), ("after", found.model))}
        return FoldingRun(found, seen, reset, {"images": len(held.dataset.test_labels), **accuracies})

    return FoldMethod({**target, "how": how, "with_data": uses_data}, run)


def _train(images: ImageSplits | None) -> Batches | None:
    return None if images is None else images.train


def _kmeans(options: Namespace) -> FoldMethod:
    from intertwine.fold.clustering import fold_kmeans

    if options.widths is None:
        raise InputError("--method kmeans needs the number of features to keep. Add --widths 0.5, or LAYER=NUMBER.")
    widths = _widths(options)

    def run(loaded: Loaded, images: ImageSplits | None, progress: output.ProgressCallback) -> FoldingRun:
        folded = fold_kmeans(loaded.model, *loaded.args, widths=widths, **loaded.kwargs)
        return FoldingRun(folded, _train(images))

    return FoldMethod({"method": "kmeans", "widths": widths}, run)


def _activations(options: Namespace) -> FoldMethod:
    from intertwine.fold.clustering import fold_activations
    from intertwine.fold.fold import fold_groups

    arguments.require_data(options, "--method activations compares activations on training images")
    arguments.refuse_together(options, "beta", "widths", reason=": either decides when to stop")
    limit = {"widths": _widths(options)} if options.widths else {"beta": _beta(options)}
    if "beta" in limit:
        Options(**limit)

    def run(loaded: Loaded, images: ImageSplits | None, progress: output.ProgressCallback) -> FoldingRun:
        assert images is not None  # required above
        groups = fold_activations(loaded.model, images.train, **limit).groups
        # merged again with the inputs of the other ways, so that FLOPs and times are those of one image too
        return FoldingRun(fold_groups(loaded.model, *loaded.args, groups=groups, **loaded.kwargs), images.train)

    return FoldMethod({"method": "activations", **limit}, run)


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
            f"{flag} {' '.join(texts)} is not a number. Write one such as 0.1, or LAYER=NUMBER{of}."
        ) from error
    if len(found) < len(texts) or ("" in found and len(found) > 1):
        raise InputError(
            f"{flag} is given {len(texts)} times ({' '.join(texts)}). Give one number for all layers, or LAYER=NUMBER "
            "once for each."
        )
    return found.get("", found)


def _beta(options: Namespace) -> Any:
    return per_layer("--beta", options.beta or ["0.1"], float)


def _widths(options: Namespace) -> Any:
    from intertwine.fold.prepare import check_share

    widths = per_layer("--widths", options.widths, int)
    check_share(widths)
    return widths


# -- The result --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FoldReport:
    """All results of one folding.

    `features`: None where features were absorbed, since the groups then do not say which are equivalent. `scores`: name
    of the network → accuracy, or None. `held_out`: see `FoldingRun`.
    """

    loaded: Loaded
    settings: Mapping[str, Any]
    folded: Fold
    features: Complexity | None
    latency: Reduction
    scores: Mapping[str, float | None]
    images: ImageSplits | None
    held_out: Mapping[str, float | int | None] | None

    def to_dict(self) -> dict[str, Any]:
        """As plain data, without that of `folded`."""
        return {
            "model": self.loaded.name, "inputs": list(self.loaded.inputs), "options": dict(self.settings),
            "latency": self.latency.to_dict(), "complexity": None if self.features is None else self.features.to_dict(),
            "dataset": None if self.images is None else self.images.name, "accuracy": dict(self.scores),
            "held_out": None if self.held_out is None else dict(self.held_out),
        }  # fmt: skip


def _features(folded: Fold, settings: Mapping[str, Any]) -> Complexity | None:
    """The number of different features in each layer, by what was merged."""
    from intertwine.fold.complexity import Complexity

    if "absorbed" in folded.rules.values():
        return None
    found = Complexity.of(folded, norm=settings.get("norm", "fold"))
    return replace(found, beta=settings.get("beta", found.beta))


def _scores(
    options: Namespace, loaded: Loaded, found: FoldingRun, images: ImageSplits | None
) -> tuple[dict[str, float | None], Fold]:
    """The accuracies, and the fold with the final network."""
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


def _write(options: Namespace, report: FoldReport) -> list[Path]:
    """Write the network, the results, and a picture where there is something to draw."""
    from intertwine.fold.result import save_folded

    folder = Path(options.out)
    inputs = options.input or ([] if report.images is None else ["x".join(map(str, (1, *report.images.shape)))])
    files = list(save_folded(folder, report.folded, options.model, inputs, report.to_dict()))
    if report.features is not None and report.features.layers:
        output.save_picture(report.features.plot(), folder / PICTURE)
        files.append(folder / PICTURE)
    return files


def _shown(report: FoldReport) -> tuple[Text | Table | None, ...]:
    folded = report.folded
    head = output.text(f"{report.loaded.name} folded", style="bold")
    if not folded.groups:
        head.append("\nnothing to fold: no layer has features that may be merged", "yellow")
    elif not folded.removed:
        head.append("\nnothing was merged: no two features are near enough; a larger --beta merges more", "yellow")
    skipped = [output.text(f"not folded: {s.what}: ", (s.reason, "dim")) for s in folded.skipped]
    if (more := len(skipped) - MAX_SKIPPED_SHOWN) > 0:
        skipped[MAX_SKIPPED_SHOWN:] = [output.text(f"and {more} more (--json has all)", style="dim")]
    return head, _costs(report), _layers(report) if folded.groups else None, output.lines(skipped)


def _costs(report: FoldReport) -> Table:
    """Before and after, one row each."""
    rows = output.table("", "before", "after", "left", left=("",))
    for name, change in (("parameters", report.folded.parameters), ("FLOPs", report.folded.flops)):
        rows.add_row(name, f"{change.before:,}", f"{change.after:,}", output.percent(change.share, 1))
    times = report.latency
    milliseconds = (f"{1000 * seconds:.2f} ms" for seconds in (times.before, times.after))
    rows.add_row("time of a forward", *milliseconds, output.percent(times.share, 1))
    if report.images is not None:
        before, *after = map(output.percent, report.scores.values())
        for name, share in zip([*report.scores][1:], after, strict=True):
            rows.add_row(f"accuracy on {report.images.name}{name.removeprefix('after')}", before, share, "")
    if report.held_out is not None:
        count, *shares = report.held_out.values()
        rows.add_row(f"accuracy on {count} held-out training images", *map(output.percent, shares), "")
    return rows


def _layers(report: FoldReport) -> Table:
    """One row per layer that can be folded."""
    from intertwine.fold.prepare import RULES

    dead = None if report.features is None else {layer.name: str(layer.dead) for layer in report.features.layers}
    betas = report.folded.betas
    heads = ("layer", "features", *(["dead"] if dead else []), "left", *(["beta"] if betas else []), "how")
    rows = output.table(*heads, left=("layer", "how"))
    for name, width in report.folded.widths.items():
        cells = [name, str(width.before), *([dead[name]] if dead else []), str(width.after)]
        rows.add_row(*cells, *([f"{betas[name]:.3g}"] if betas else []), RULES[report.folded.rules[name]])
    return rows
