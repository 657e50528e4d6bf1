"""`intertwine merge A B …`: merges several networks into one and scores it beside them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from intertwine.cli import arguments, output
from intertwine.cli.networks import ImageSplits, load_networks, read_images
from intertwine.errors import InputError

if TYPE_CHECKING:
    from torch import nn

    from intertwine.checkpoints.load import Loaded
    from intertwine.connect.merge import Merged, NetworkScore


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Merge several networks of one architecture: move them into a common frame, average, repair. With --data, the "
        "result is compared with the given networks and with their plain mean, with and without the same repair, on "
        "test images." + arguments.ZOO
    )
    command.add_argument("models", metavar="MODEL", nargs="+", help=f"two or more: {arguments.MODEL}")
    command.add_argument(
        "--weights", metavar="FILE", action="append", default=[],
        help="a checkpoint; repeat it, one for each network in their order, - for a network that needs none",
    )  # fmt: skip
    arguments.add_input(command)
    arguments.add_method(command, "as for align; also none (the plain mean), sorted (the mean of NodeSort forms)")
    arguments.add_data(command, "at most this many training images to align and repair on, and test images to score on")
    command.add_argument(
        "--repair", choices=("reset", "repair", "scales", "none"), default="none",
        help="reset: BatchNorm statistics, on data. repair: REPAIR, on data. scales: sizes of units, without data",
    )  # fmt: skip
    command.add_argument("--weights-of", metavar="W,…", help="shares of the mean, such as 0.7,0.3 (default: equal)")
    command.add_argument("--out", metavar="FILE", help="write the merged weights (safetensors)")
    arguments.add_json(command)


def run(options: Namespace) -> int:
    """Carry out the command."""
    from intertwine.checkpoints.weights import write_checkpoint
    from intertwine.connect.merge import score_notes, scored

    _check(options)
    with output.status("building the networks") as step:
        images = read_images(options, options.models)
        networks = load_networks(options.models, _checkpoints(options), options.input, images)
        step(f"merging by {options.method}")
        merged = _merged(options, options.method, options.repair, networks, images)
        scores: tuple[NetworkScore, ...] = ()
        if images is not None:
            step(f"scoring on {images.name}")
            named = {f"{i} {network.name}": network.model for i, network in enumerate(networks)}
            plain = _plain_means(options, merged, networks, images)
            scores = scored({"merged": merged.model} | plain | named, images.test, None)
        if options.out:
            write_checkpoint(merged.model, options.out)
    notes = [*merged.notes, *score_notes(scores), *_new_tensors(networks[0].model, merged.model)]
    if options.json:
        head = {"models": [network.name for network in networks], "dataset": None if images is None else images.name}
        tail = {"scores": [asdict(score) for score in scores], "notes": notes, "out": options.out}
        output.print_json(head | merged.to_dict() | tail)
    else:
        _show(merged, scores, notes, images)
        if options.out:
            output.terminal().print(output.text(f"\nwrote {options.out}"))
    return 0


def _check(options: Namespace) -> None:
    """Refuse options that do not go together, before any work."""
    from intertwine.connect.merge import WITHOUT_SEARCH

    if options.method in WITHOUT_SEARCH and options.option:
        raise InputError(
            f"--option {options.option[0]} has no effect: the method {options.method!r} does not search and has no "
            "options. Leave it out, or choose another method."
        )
    arguments.method_options(options.method, options.option)
    _shares(options)
    arguments.require_method_data(options)
    if options.repair in ("reset", "repair"):
        arguments.require_data(options, f"--repair {options.repair} measures on data")


def _merged(
    options: Namespace, method: str, repair: str, networks: Sequence[Loaded], images: ImageSplits | None
) -> Merged:
    """The network merged with the training images; it is scored on the test images."""
    from intertwine.connect.merge import WITHOUT_SEARCH, merge

    return merge(
        [network.model for network in networks], *networks[0].args, data=images and images.train, method=method,
        repair=None if repair == "none" else repair, weights=_shares(options), check=False, seed=options.seed,
        options=None if method in WITHOUT_SEARCH else arguments.method_options(method, options.option),
        **networks[0].kwargs,
    )  # fmt: skip


def _plain_means(
    options: Namespace, merged: Merged, networks: Sequence[Loaded], images: ImageSplits
) -> dict[str, nn.Module]:
    """The plain mean of the networks, and with --repair the same mean with that repair."""
    from intertwine.connect.merge import PLAIN_MEAN, REPAIRED_MEAN

    names = {"none": PLAIN_MEAN} | ({} if options.repair == "none" else {options.repair: REPAIRED_MEAN})
    same = options.repair if options.method == "none" else None
    return {
        name: (merged if repair == same else _merged(options, "none", repair, networks, images)).model
        for repair, name in names.items()
    }


def _checkpoints(options: Namespace) -> list[str | None]:
    files = options.weights
    if files and len(files) != len(options.models):
        networks, checkpoints = (
            output.count_of(len(options.models), "network"),
            output.count_of(len(files), "checkpoint"),
        )
        raise InputError(
            f"{networks} and {checkpoints} are given. Repeat --weights once for each network, in their order; write "
            "--weights - for a network that needs none."
        )
    return [None if file == "-" else file for file in files] or [None] * len(options.models)


def _shares(options: Namespace) -> list[float] | None:
    return None if options.weights_of is None else arguments.number_list("--weights-of", options.weights_of, "0.7,0.3")


def _new_tensors(given: nn.Module, merged: nn.Module) -> list[str]:
    """A note where REPAIR added biases: such a checkpoint does not fit the given architecture."""
    new = [name for name in merged.state_dict() if name not in given.state_dict()]
    if not new:
        return []
    return [
        f"The merged network has {output.count_of(len(new), 'tensor')} that the given ones lack ({', '.join(new[:3])}"
        f"{' …' * (len(new) > 3)}): the repair needs a bias there. Its weights load only into a network with these."
    ]


def _show(merged: Merged, scores: Sequence[NetworkScore], notes: Sequence[str], images: ImageSplits | None) -> None:
    from intertwine.connect.merge import PLAIN_MEAN, REPAIRED_MEAN

    head = output.text(f"{len(merged.weights)} networks merged by {merged.method}", style="bold")
    head.append(f", repaired by {merged.repair}" if merged.repair else "")
    shares = ", ".join(f"{share:.4g}" for share in merged.weights)
    head.append(
        f"\nsquared distances to the mean {merged.before:.4g} → {merged.after:.4g}; shares {shares}", "not bold"
    )
    rows = None
    if images is not None:
        on = f"on test images of {images.name}"
        rows = output.table(on, "loss", "accuracy", left=(on,))
        itself = None if merged.method != "none" else REPAIRED_MEAN if merged.repair else PLAIN_MEAN
        for score in scores:
            if score.name != itself:
                rows.add_row(
                    score.name, f"{score.loss:.4f}", output.percent(None if score.error is None else 1 - score.error)
                )
    output.show(head, rows, output.lines(notes, "yellow"))
