"""Outlines: wires stand under the module that holds them, fibres under their base, and repetitions are told once."""

import pytest
import torch
from torch import nn

from intertwine.report.folding import Run, runs, template
from intertwine.report.outline import Line, Section, outline, reasons, title
from intertwine.symmetry.symmetry import symmetry
from intertwine.symmetry.wire import Frozen, Group, Slot, Wire


def told(section: Section, depth: int = 0) -> list[str]:
    """The outline as lines of text."""

    def lines(line: Line, deep: int) -> list[str]:
        return [f"{'  ' * deep}{title(line)} {line.wire.size}", *(t for f in line.fibres for t in lines(f, deep + 1))]

    own = [text for line in section.lines for text in lines(line, depth)]
    inner = [t for s in section.sections for t in [f"{'  ' * depth}{title(s)}:", *told(s, depth + 1)]]
    return own + inner


def wire(name: str, *parameters: str, size: int = 4, over: tuple[str, ...] = ()) -> Wire:
    slots = tuple(Slot(p, 0, "permuted", 0, 1) for p in parameters)
    return Wire(name, size, Group(size, permutes=True), slots, over)


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keys", "found"),
    [
        ("", []),
        ("a", [(0, 1, 1)]),
        ("ab", [(0, 1, 1), (1, 1, 1)]),
        ("aaaa", [(0, 1, 4)]),
        ("abab", [(0, 2, 2)]),
        ("abcabcabcab", [(0, 3, 3), (9, 1, 1), (10, 1, 1)]),
        ("aabaab", [(0, 3, 2)]),
        ("baaaac", [(0, 1, 1), (1, 1, 4), (5, 1, 1)]),
    ],
)
def test_runs(keys: str, found: list[tuple[int, int, int]]) -> None:
    assert runs(keys) == [Run(*run) for run in found]


@pytest.mark.parametrize("keys", ["abcdefgabcdefg", "aabbaabb", "abcbcbca", "aaaaaaaaaaaaaaaaaaab"])
def test_runs_cover_everything_once_and_truly_repeat(keys: str) -> None:
    unfolded = "".join(keys[run.start : run.start + run.period] * run.count for run in runs(keys))
    assert unfolded == keys


def test_a_template_has_no_numbers() -> None:
    assert template("encoder_layer_3.h12") == template("encoder_layer_14.h0") != template("encoder_block_3.h12")


# -- sections ----------------------------------------------------------------------------------------------------------


def test_a_wire_stands_in_the_module_that_holds_all_its_places() -> None:
    wires = [
        wire("stem", "stem.weight", "blocks.0.out.weight", "blocks.1.out.weight"),
        wire("blocks.0.in", "blocks.0.in.weight", "blocks.0.out.weight", size=7),
        wire("head.inner", "head.inner.weight", "head.outer.weight"),
    ]
    assert told(outline(wires)) == ["stem 4", "blocks.0:", "  in 7", "head:", "  inner 4"]


def test_a_wire_of_one_layer_keeps_its_name() -> None:
    assert told(outline([wire("fc", "fc.weight", "fc.bias")])) == ["fc 4"]
    assert told(outline([wire("a.fc[3]", "a.fc.weight")])) == ["a:", "  fc[3] 4"]


def test_no_wires() -> None:
    assert outline([]) == Section("")


def test_equal_blocks_are_told_once() -> None:
    wires = [wire(f"net.layers.{i}.in", f"net.layers.{i}.in.weight", f"net.layers.{i}.out.weight") for i in range(24)]
    assert told(outline(wires)) == ["net.layers.0 … net.layers.23 (×24):", "  in 4"]


def test_a_block_that_differs_is_told_apart() -> None:
    sizes = [4, 4, 5, 4, 4]
    wires = [wire(f"b.{i}.in", f"b.{i}.in.weight", f"b.{i}.out.weight", size=n) for i, n in enumerate(sizes)]
    assert told(outline(wires)) == ["b:", "  0 … 1 (×2):", "    in 4", "  2:", "    in 5", "  3 … 4 (×2):", "    in 4"]


def test_blocks_that_take_turns_are_told_once() -> None:
    wires = [wire(f"b.{i}.in", f"b.{i}.in.weight", f"b.{i}.out.weight", size=4 + i % 2) for i in range(8)]
    assert told(outline(wires)) == ["b.0 … b.7 (×4):", "  0:", "    in 4", "  1:", "    in 5"]


def test_nested_blocks_fold_inside_out() -> None:
    wires = [
        wire(f"s.{i}.b.{j}.in", f"s.{i}.b.{j}.in.weight", f"s.{i}.b.{j}.out.weight") for i in range(3) for j in range(2)
    ]
    assert told(outline(wires)) == ["s.0.b.0 … s.2.b.0 (×3):", "  0.b.0 … 0.b.1 (×2):", "    in 4"]


def test_three_wires_alike_are_one_line_and_two_are_not() -> None:
    chain = [wire(str(i), f"{i}.weight", f"{i + 1}.weight") for i in range(5)]
    assert told(outline(chain)) == ["0 … 4 (×5) 4"]
    assert told(outline(chain[:2])) == ["0 4", "1 4"]


def test_fibres_stand_under_their_base_in_turns() -> None:
    heads = wire("b.0.q/outer", *(f"b.{i}.{x}.weight" for i in range(3) for x in "qv"), size=2)
    inner = [
        wire(f"b.{i}.{x}/inner", f"b.{i}.{x}.weight", over=("b.0.q/outer",), size=8 if x == "q" else 6)
        for i in range(3)
        for x in "qv"
    ]
    assert told(outline([heads, *inner])) == [
        "b:",
        "  0.q/outer 2",
        "    0.q/inner … 2.q/inner (×3) 8",
        "    0.v/inner … 2.v/inner (×3) 6",
    ]


def test_a_fibre_over_something_still_stands_alone() -> None:
    assert told(outline([wire("a.q/inner", "a.q.weight", over=("still 3",))])) == ["a:", "  q/inner 4"]


def test_every_wire_of_a_real_network_is_told_once() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    sym = symmetry(model, torch.zeros(1, 3, 8))

    def counted(section: Section) -> int:
        def lines(line: Line) -> int:
            return line.count * (1 + sum(map(lines, line.fibres)))

        return section.count * (sum(map(lines, section.lines)) + sum(map(counted, section.sections)))

    assert "layers.0 … layers.3 (×4):" in told(outline(sym.wires))
    assert counted(outline(sym.wires)) == len(sym.wires)


# -- reasons -----------------------------------------------------------------------------------------------------------


def test_one_cause_in_many_places_is_one_reason() -> None:
    frozen = [
        Frozen("head.weight axis 0", "it is an axis of the model's output"),
        Frozen("a.weight axis 2", "positions along it matter to conv2d at resnet.py:779 in a"),
        Frozen("b.weight axis 2", "positions along it matter to conv2d at resnet.py:131 in layer1.0.b"),
        Frozen("c.weight axis 0", "its rows are looked up by index (embedding at modeling_gpt2.py:569 in wte)"),
        Frozen("d.weight axis 0", "its rows are looked up by index (embedding at wpe)"),
        Frozen("e.weight axis 0", "its rows are looked up by index (embedding at the model's forward)"),
        Frozen("f.weight axis 0", "there is no rule for aten.sort.default (nets.py:4)"),
    ]
    assert [(r.text, len(r.axes), r.axes[0]) for r in reasons(frozen)] == [
        ("its rows are looked up by index (embedding)", 3, "c.weight axis 0"),
        ("positions along it matter to conv2d", 2, "a.weight axis 2"),
        ("it is an axis of the model's output", 1, "head.weight axis 0"),
        ("there is no rule for aten.sort.default", 1, "f.weight axis 0"),
    ]
