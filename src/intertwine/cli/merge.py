"""`intertwine merge A B …`: one network out of several, scored beside them."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

from intertwine.cli.arguments import MODEL, ZOO, add_data, add_input, add_json, add_method, method_options
from intertwine.cli.networks import ImageSplits, load_networks, read_images, require_data
from intertwine.cli.output import print_json, spaced, status, terminal
from intertwine.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text
    from torch import nn

    from intertwine.checkpoints.load import Loaded
    from intertwine.connect.merge import Merged, NetworkScore

# ----------------------------------------------------------------------------------------------------
# Arguments of `intertwine merge`.


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "One network out of several of one architecture: moved into a common frame, averaged, mended. With --data, it "
        "is compared with the given networks and with their plain mean, as it is and mended alike, on test images."
        + ZOO
    )
    command.add_argument("models", metavar="MODEL", nargs="+", help=f"two or more: {MODEL}")
    command.add_argument(
        "--weights",
        metavar="FILE",
        action="append",
        default=[],
        help="a checkpoint; repeat it, one for each network in their order, - for a network that needs none",
    )
    add_input(command)
    add_method(command, "as for align; also none (the plain mean), sorted (the mean of NodeSort forms)")
    add_data(command, "at most so many training images to align and mend on, and test images to score on")
    command.add_argument(
        "--repair",
        choices=("reset", "repair", "scales", "none"),
        default="none",
        help="reset: BatchNorm statistics, on data. repair: REPAIR, on data. scales: sizes of units, without data",
    )
    command.add_argument("--weights-of", metavar="W,…", help="shares of the mean, such as 0.7,0.3 (default: equal)")
    command.add_argument("--out", metavar="FILE", help="write the merged weights (safetensors)")
    add_json(command)


# ----------------------------------------------------------------------------------------------------
# `intertwine merge A B …`: one network out of several, and how it does beside them.


def run(options: Namespace) -> int:
    """Carry out the command."""
    from rich.text import Text

    from intertwine.checkpoints.weights import write_checkpoint
    from intertwine.connect.merge import score_notes, scored

    _check(options)
    with status("building the networks") as say:
        images = read_images(options, options.models)
        networks = load_networks(options.models, _checkpoints(options), options.input, images)
        say(f"merging by {options.method}")
        merged = _merged(options, options.method, options.repair, networks, images)
        scores: tuple[NetworkScore, ...] = ()
        if images is not None:
            say(f"scoring on {images.name}")
            named = {f"{i} {network.name}": network.model for i, network in enumerate(networks)}
            plain = _plain_means(options, merged, networks, images)
            scores = scored({"merged": merged.model} | plain | named, images.test, None)
        if options.out:
            write_checkpoint(merged.model, options.out)
    notes = [*merged.notes, *score_notes(scores), *_new_tensors(networks[0].model, merged.model)]
    if options.json:
        head = {"models": [network.name for network in networks], "dataset": None if images is None else images.name}
        tail = {"scores": [asdict(score) for score in scores], "notes": notes, "out": options.out}
        print_json(head | merged.to_dict() | tail)
    else:
        _show(merged, scores, notes, images)
        if options.out:
            terminal().print(Text(f"\nwrote {options.out}"))
    return 0


def _merged(
    options: Namespace, method: str, repair: str, networks: Sequence[Loaded], images: ImageSplits | None
) -> Merged:
    """Images to learn from make the network; it is scored on others."""
    from intertwine.connect.merge import WITHOUT_SEARCH, merge

    searches = method not in WITHOUT_SEARCH
    return merge(
        [network.model for network in networks], *networks[0].args, data=images and images.train, method=method,
        repair=None if repair == "none" else repair, weights=_shares(options.weights_of), check=False,
        options=method_options(method, options.option) if searches else None, seed=options.seed, **networks[0].kwargs,
    )  # fmt: skip


def _plain_means(
    options: Namespace, merged: Merged, networks: Sequence[Loaded], images: ImageSplits
) -> dict[str, nn.Module]:
    """The mean of the networks as they are, and where a repair was asked for the same mean mended alike."""
    from intertwine.connect.merge import PLAIN_MEAN, REPAIRED_MEAN

    names = {"none": PLAIN_MEAN} | ({} if options.repair == "none" else {options.repair: REPAIRED_MEAN})
    same = options.repair if options.method == "none" else None
    return {
        name: (merged if repair == same else _merged(options, "none", repair, networks, images)).model
        for repair, name in names.items()
    }


# -- what was asked ----------------------------------------------------------------------------------------------------


def _check(options: Namespace) -> None:
    from intertwine.align.align import SOLVERS
    from intertwine.connect.merge import WITHOUT_SEARCH

    if options.method in WITHOUT_SEARCH and options.option:
        raise InputError(
            f"The option {options.option[0]} was given, but the method {options.method!r} searches for nothing and has "
            "no options. Leave it out, or choose another method."
        )
    method_options(options.method, options.option)
    _shares(options.weights_of)
    if options.data is None:
        if options.method in SOLVERS and SOLVERS[options.method].needs_data:
            require_data(f"The method {options.method!r} looks at what the networks do on data")
        if options.repair in ("reset", "repair"):
            require_data(f"--repair {options.repair} measures on data")


def _checkpoints(options: Namespace) -> list[str | None]:
    files = options.weights
    if files and len(files) != len(options.models):
        raise InputError(
            f"{len(options.models)} networks and {len(files)} checkpoint{'s' * (len(files) != 1)} were given. Repeat "
            "--weights once for each network, in their order; write --weights - for a network that needs none."
        )
    return [None if file == "-" else file for file in files] or [None] * len(options.models)


def _shares(text: str | None) -> list[float] | None:
    try:
        return None if text is None else [float(part) for part in text.split(",")]
    except ValueError as error:
        raise InputError(
            f"The shares {text!r} were asked for. Write one number per network, with commas between, such as 0.7,0.3."
        ) from error


def _new_tensors(given: nn.Module, merged: nn.Module) -> list[str]:
    """REPAIR gives a bias to layers that have none; such a checkpoint fits the architecture no more."""
    new = [name for name in merged.state_dict() if name not in given.state_dict()]
    if not new:
        return []
    return [
        f"The merged network has {len(new)} tensor{'s' * (len(new) != 1)} that the given ones lack ("
        f"{', '.join(new[:3])}{' …' * (len(new) > 3)}): mending needed a bias there. Its weights load only into a "
        "network with these."
    ]


# -- in the terminal ---------------------------------------------------------------------------------------------------


def _show(merged: Merged, scores: Sequence[NetworkScore], notes: Sequence[str], images: ImageSplits | None) -> None:
    from rich.table import Table
    from rich.text import Text

    from intertwine.connect.merge import PLAIN_MEAN, REPAIRED_MEAN

    head = Text(f"{len(merged.weights)} networks merged by {merged.method}", style="bold")
    head.append(f", mended by {merged.repair}" if merged.repair else "")
    shares = ", ".join(f"{share:.4g}" for share in merged.weights)
    head.append(
        f"\nsquared distances to the mean {merged.before:.4g} → {merged.after:.4g}; shares {shares}", "not bold"
    )
    parts: list[Text | Table] = [head]
    if images is not None:
        table = Table(box=None, pad_edge=False, header_style="dim")
        for name in (f"on test images of {images.name}", "loss", "accuracy"):
            table.add_column(name, justify="right" if name in ("loss", "accuracy") else "left")
        itself = None if merged.method != "none" else REPAIRED_MEAN if merged.repair else PLAIN_MEAN
        for score in scores:
            if score.name != itself:
                accuracy = "–" if score.error is None else f"{1 - score.error:.2%}"
                table.add_row(score.name, f"{score.loss:.4f}", accuracy)
        parts.append(table)
    parts += [Text("\n").join(Text(note, style="yellow") for note in notes)] if notes else []
    terminal().print(spaced(*parts))
