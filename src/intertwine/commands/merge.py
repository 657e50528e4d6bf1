"""`intertwine merge A B …`: one network out of several, and how it does beside them."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict

from rich.table import Table
from rich.text import Text
from torch import nn

from intertwine.align.align import SOLVERS
from intertwine.checkpoint import write_checkpoint
from intertwine.commands import show
from intertwine.commands.document import print_json
from intertwine.commands.networks import Images, load_networks, need_data, read_images
from intertwine.commands.progress import status
from intertwine.commands.settings import settings
from intertwine.connect.merged import MENDED_MEAN, PLAIN_MEAN, Merged, Score, score_notes, scored
from intertwine.connect.merging import PLAIN, merge
from intertwine.errors import InputError
from intertwine.models import Loaded


def run(options: Namespace) -> int:
    """Carry out the command."""
    _check(options)
    with status("building the networks") as say:
        images = read_images(options, options.models)
        networks = load_networks(options.models, _checkpoints(options), options.input, images)
        say(f"merging by {options.method}")
        merged = _merged(options, options.method, options.repair, networks, images)
        scores: tuple[Score, ...] = ()
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
            show.terminal().print(Text(f"\nwrote {options.out}"))
    return 0


def _merged(options: Namespace, method: str, repair: str, networks: Sequence[Loaded], images: Images | None) -> Merged:
    """Images to learn from make the network; it is scored on others."""
    searches = method not in PLAIN
    return merge(
        [network.model for network in networks], *networks[0].args, data=images and images.train, method=method,
        repair=None if repair == "none" else repair, weights=_shares(options.weights_of), check=False,
        options=settings(method, options.option) if searches else None, seed=options.seed, **networks[0].kwargs,
    )  # fmt: skip


def _plain_means(
    options: Namespace, merged: Merged, networks: Sequence[Loaded], images: Images
) -> dict[str, nn.Module]:
    """The mean of the networks as they are, and where a repair was asked for the same mean mended alike."""
    names = {"none": PLAIN_MEAN} | ({} if options.repair == "none" else {options.repair: MENDED_MEAN})
    same = options.repair if options.method == "none" else None
    return {
        name: (merged if repair == same else _merged(options, "none", repair, networks, images)).model
        for repair, name in names.items()
    }


# -- what was asked ----------------------------------------------------------------------------------------------------


def _check(options: Namespace) -> None:
    if options.method in PLAIN and options.option:
        raise InputError(
            f"The option {options.option[0]} was given, but the method {options.method!r} searches for nothing and has "
            "no options. Leave it out, or choose another method."
        )
    settings(options.method, options.option)
    _shares(options.weights_of)
    if options.data is None:
        if options.method in SOLVERS and SOLVERS[options.method].needs_data:
            need_data(f"The method {options.method!r} looks at what the networks do on data")
        if options.repair in ("reset", "repair"):
            need_data(f"--repair {options.repair} measures on data")


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


def _show(merged: Merged, scores: Sequence[Score], notes: Sequence[str], images: Images | None) -> None:
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
        itself = None if merged.method != "none" else MENDED_MEAN if merged.repair else PLAIN_MEAN
        for score in scores:
            if score.name != itself:
                accuracy = "–" if score.error is None else f"{1 - score.error:.2%}"
                table.add_row(score.name, f"{score.loss:.4f}", accuracy)
        parts.append(table)
    parts += [Text("\n").join(Text(note, style="yellow") for note in notes)] if notes else []
    show.terminal().print(show.spaced(*parts))
