"""Arguments of `intertwine canonicalize`."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from intertwine.commands.arguments.shared import CERTIFICATE, add_exit_codes, add_json, add_model, number


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = (
        "Bring a network to its canonical form, which it shares with all networks that differ from it only by a "
        "symmetry. With --dedupe: find the checkpoints of a folder that are one network up to its symmetry."
    )
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--order",
        choices=("lexicographic", "nodesort", "nodesort-printed"),
        help="how units are sorted (default lexicographic)",
    )
    command.add_argument("--base", metavar="P", type=number, help="base of the NodeSort orders, above 1 (default 1.1)")
    command.add_argument("--out", metavar="FILE", help="write the canonical weights (safetensors)")
    command.add_argument(
        "--element", metavar="FILE", help="write the element that takes the model to its canonical form"
    )
    command.add_argument("--dedupe", metavar="DIR", help="compare all checkpoints of a folder, and write nothing")
    command.add_argument(
        "--tol",
        metavar="T",
        type=number,
        help="with --dedupe: relative difference up to which a copy counts (default 1e-6)",
    )
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="prove the symmetry first (default)"
    )
    add_json(command)
