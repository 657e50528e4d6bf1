"""Public names: few at the top, those of the contract among them, the same ones for type checkers and for users."""

from __future__ import annotations

import ast
import inspect
from importlib import import_module

import pytest

import intertwine

#: What docs and users may rely on, whatever is moved behind it.
CONTRACT = set(
    """symmetry activation_group canonicalize fingerprint equivalent align align_many interpolate barrier connectivity
    merge measure measures compare stitch complexity fold rotation dissect guided_backprop features
    zoo study report""".split()
)
MOST = 40
LAZY = ("intertwine", "intertwine.zoo", "intertwine.study", "intertwine.report")


def names_for_type_checkers(package: str) -> set[str]:
    """What stands under `if TYPE_CHECKING:` in a package's `__init__`."""
    tree = ast.parse(inspect.getsource(import_module(package)))
    blocks = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {alias.asname or alias.name for node in imports for alias in node.names}


def test_the_top_level_is_small_and_holds_the_contract() -> None:
    names = {name for name in dir(intertwine) if not name.startswith("_")}
    assert names >= CONTRACT
    assert len(names) <= MOST, "what fewer users need is imported from its own module; see docs/api/index.md"


@pytest.mark.parametrize("package", LAZY)
def test_type_checkers_and_users_see_the_same_names(package: str) -> None:
    module = import_module(package)
    assert names_for_type_checkers(package) == set(dir(module))
    for name in dir(module):
        assert getattr(module, name).__name__.rpartition(".")[2] == name


@pytest.mark.parametrize("package", LAZY)
def test_a_name_that_is_not_there_is_said_as_python_says_it(package: str) -> None:
    with pytest.raises(AttributeError, match=f"^module '{package}' has no attribute 'nothing'$"):
        import_module(package).nothing  # noqa: B018
