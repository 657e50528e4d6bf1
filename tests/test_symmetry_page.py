"""docs/symmetry.md: its table is what the code finds, its examples run, its figure can be drawn, its links lead on."""

import re
from pathlib import Path

import pytest
import torch
from pages import DOCS, script
from torch.nn.modules import activation

PAGE = (DOCS / "symmetry.md").read_text(encoding="utf-8")


def test_the_table_is_what_the_code_finds() -> None:
    assert script("activations").rewritten(PAGE) == PAGE, "run: python docs/activations.py"


def test_an_old_table_is_seen() -> None:
    activations = script("activations")
    old = PAGE.replace("| `positive` | a > 0 | a |", "| `positive` | a > 0 | a² |")
    assert old != PAGE
    assert activations.rewritten(old) == PAGE
    with pytest.raises(SystemExit, match="no block between"):
        activations.rewritten("# nothing here")


def test_no_activation_of_torch_is_left_out() -> None:
    activations = script("activations")
    shown = {type(m).__name__ for m in (*activations.MODULES.values(), *activations.REFUSED.values())}
    assert set(activation.__all__) <= shown
    for name in (*activations.MODULES, *activations.REFUSED):
        assert name in PAGE


def test_what_is_refused_is_refused() -> None:
    activations = script("activations")
    assert all(activations.is_refused(module) for module in activations.REFUSED.values())
    assert not activations.is_refused(torch.relu)


def test_the_examples_run() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(block.replace("print(", "str("), names)  # the blocks build on each other, as on the page


def test_the_results_in_the_examples_are_true() -> None:
    names: dict[str, object] = {}
    exec("import torch, intertwine as it\nfrom intertwine.symmetry.homogeneity import homogeneity_defect", names)
    claims = re.findall(r"^((?:it\.activation_group|homogeneity_defect)\(.*)  # ('\w+'|[\d.]+)", PAGE, re.MULTILINE)
    assert len(claims) >= 4
    for code, said in claims:
        found = eval(code, names)
        expected = eval(said)
        assert found == (pytest.approx(expected, abs=5e-5) if isinstance(expected, float) else expected), code


def test_the_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", PAGE):
        assert (DOCS / target).exists(), target
    for file in re.findall(r"tests/\w+\.py", PAGE):
        assert (DOCS.parent / file).exists(), file


def test_the_figure_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figures = script("figures")
    figures.gelu_defect(tmp_path / "first.svg")
    figures.gelu_defect(tmp_path / "second.svg")
    first = (tmp_path / "first.svg").read_text(encoding="utf-8")
    assert "GELU" in first
    assert first == (tmp_path / "second.svg").read_text(encoding="utf-8")
    assert (DOCS / "images" / "gelu-defect.svg").read_text(encoding="utf-8").startswith("<?xml")
