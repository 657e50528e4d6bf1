"""`intertwine inspect MODEL`: the symmetry of a network, its proof, and its picture."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from rich.text import Text

from intertwine.commands import show
from intertwine.commands.document import print_json
from intertwine.commands.pictures import SVG, check_picture
from intertwine.commands.progress import status
from intertwine.errors import InputError
from intertwine.files import write_text
from intertwine.models import Loaded, load
from intertwine.models.huggingface import physical_memory
from intertwine.report.wire_graph import wire_graph
from intertwine.symmetry.certificate import Certificate
from intertwine.symmetry.symmetry import Symmetry, symmetry

#: A certificate holds the model, a copy of it in float64 and a moved copy of that: five times its size in float32.
COPIES = 5


def run(options: Namespace) -> int:
    """Carry out the command; 1 when the certificate fails."""
    check_picture(options.svg, SVG)
    with status(f"building {options.model}") as say:
        loaded = load(options.model, options.weights, options.input)
        say("reading its symmetry")
        found = symmetry(loaded.model, *loaded.args, continuous=options.continuous, **loaded.kwargs)
        held: Certificate | None = None
        if options.certify:
            _check_room(loaded)
            say(f"proving it on {options.trials} random elements, in float64")
            held = found.certify(loaded.model, *loaded.args, trials=options.trials, **loaded.kwargs)
            found = held.symmetry
        if options.svg:
            say("drawing")
            write_text(options.svg, wire_graph(found, loaded.model, loaded.name))
    if options.json:
        print_json(as_dict(loaded, found, held))
    else:
        parts = [show.header(loaded.name, found, loaded.model), show.tree(found, options.slots)]
        parts += [show.frozen(found, options.frozen), show.certificate(held)]
        files = [Text(f"wrote {options.svg}")] if options.svg else []
        show.terminal().print(show.spaced(*parts, *files))
    return 0 if held is None or held.ok else 1


def as_dict(loaded: Loaded, found: Symmetry, held: Certificate | None) -> dict[str, Any]:
    """Everything the command found."""
    head = {"model": loaded.name, "parameters": loaded.parameters, "inputs": list(loaded.inputs)}
    tail = {"coverage": found.coverage(loaded.model), "certificate": held.to_dict() if held else None}
    return head | found.to_dict() | tail


def _check_room(loaded: Loaded) -> None:
    memory = physical_memory()
    if memory is not None and COPIES * loaded.bytes > memory:
        raise InputError(
            f"A certificate of {loaded.name} needs about {COPIES * loaded.bytes / 1e9:.0f} GB, and this machine has "
            f"{memory / 1e9:.0f} GB. Pass --no-certify, or certify a model with fewer blocks of the same kind."
        )
