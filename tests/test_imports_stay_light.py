"""Optional packages stay optional: `import intertwine` loads none of them, and `intertwine --help` not even torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src"
OPTIONAL = {
    *("matplotlib", "pandas", "plotly", "polars", "ray"),
    *("rich", "sklearn", "timm", "torchvision", "transformers"),
}
REACH_EVERY_PUBLIC_NAME = """\
import intertwine
for name in dir(intertwine):
    if not name.startswith("_"):
        getattr(intertwine, name)
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A fresh interpreter that reports, on its standard error, every module it imports."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run(
        [sys.executable, "-X", "importtime", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def packages(done: subprocess.CompletedProcess[str]) -> set[str]:
    """The top-level packages that a run imported: the last column of each line of `-X importtime`."""
    lines = (line for line in done.stderr.splitlines() if line.startswith("import time:"))
    return {line.rpartition("|")[2].strip().split(".")[0] for line in lines}


def test_imports_are_seen() -> None:
    assert {"json", "torch", "sympy"} & packages(run("-c", "import json")) == {"json"}


def test_import_loads_no_optional_package() -> None:
    loaded = packages(run("-c", "import intertwine"))
    assert "intertwine" in loaded
    assert loaded & OPTIONAL == set()


def test_no_public_name_needs_an_optional_package() -> None:
    loaded = packages(run("-c", REACH_EVERY_PUBLIC_NAME))
    assert "torch" in loaded, "dir(intertwine) should list the public names, those loaded on first use included"
    assert loaded & OPTIONAL == set()


@pytest.mark.parametrize("command", [["--help"], ["demo", "--help"]], ids=" ".join)
def test_help_does_not_import_torch(command: list[str]) -> None:
    done = run("-m", "intertwine.cli", *command)
    assert "usage:" in done.stdout
    assert packages(done) & {"torch", "scipy", *OPTIONAL - {"rich"}} == set()


def test_a_network_of_the_users_own_loads_no_zoo() -> None:
    done = run("-c", "import intertwine.commands.inspect")
    assert "intertwine" in packages(done)
    assert "triton" not in packages(done)
    assert "intertwine.zoo.trainer" not in done.stderr
