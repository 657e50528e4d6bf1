"""Arguments of `intertwine inspect`."""

from __future__ import annotations

from argparse import ArgumentParser, BooleanOptionalAction

from intertwine.commands.arguments.shared import CERTIFICATE, add_exit_codes, add_json, add_model, positive


def add(command: ArgumentParser) -> None:
    """Give the parser its arguments."""
    command.description = "Read the symmetry off a network, prove it on random elements, and show it."
    add_exit_codes(command, CERTIFICATE)
    add_model(command)
    command.add_argument(
        "--certify", action=BooleanOptionalAction, default=True, help="prove the symmetry in float64 (default)"
    )
    command.add_argument(
        "--trials", metavar="N", type=positive, default=3, help="random elements to prove it on (default 3)"
    )
    command.add_argument("--continuous", action="store_true", help="let whole matrices act where only linear maps meet")
    command.add_argument("--frozen", action="store_true", help="list every frozen axis with its reason")
    command.add_argument("--slots", action="store_true", help="list where each wire acts")
    add_json(command)
    command.add_argument("--svg", metavar="FILE", help="write a picture of the wires")
