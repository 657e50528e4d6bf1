"""Tests of the outline of a symmetry (wires by module, repetitions joined) and of the wire graph."""

from functools import cache
from itertools import combinations, pairwise
from xml.etree import ElementTree

import pytest
import torch
from torch import Tensor, nn

from intertwine.lab.report.outline import (
    OutlineLine,
    OutlineSection,
    Repetition,
    frozen_reasons,
    number_free,
    outline,
    repetitions,
    title,
)
from intertwine.lab.report.svg import GREY, element
from intertwine.lab.report.wire_boxes import Segment, boxes_of, fold_boxes
from intertwine.lab.report.wire_graph import _Picture, row_cells, row_width, wire_graph
from intertwine.symmetry.symmetry import Symmetry, symmetry
from intertwine.symmetry.wire import Frozen, Slot, Wire, WireGroup


def lines_of(section: OutlineSection, depth: int = 0) -> list[str]:
    """The outline as lines of text."""

    def lines(line: OutlineLine, deep: int) -> list[str]:
        return [
            f"{'  ' * deep}{title(line)} {line.wire.size}",
            *(t for d in line.dependents for t in lines(d, deep + 1)),
        ]

    own = [text for line in section.lines for text in lines(line, depth)]
    inner = [t for s in section.sections for t in [f"{'  ' * depth}{title(s)}:", *lines_of(s, depth + 1)]]
    return own + inner


def wire(name: str, *parameters: str, size: int = 4, over: tuple[str, ...] = ()) -> Wire:
    slots = tuple(Slot(p, 0, "permuted", 0, 1) for p in parameters)
    return Wire(name, size, WireGroup(size, permutes=True), slots, over)


# -- Runs --------------------------------------------------------------------------------------------------------------


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
    assert repetitions(keys) == [Repetition(*run) for run in found]


@pytest.mark.parametrize("keys", ["abcdefgabcdefg", "aabbaabb", "abcbcbca", "aaaaaaaaaaaaaaaaaaab"])
def test_runs_cover_everything_once_and_truly_repeat(keys: str) -> None:
    unfolded = "".join(keys[run.start : run.start + run.period] * run.count for run in repetitions(keys))
    assert unfolded == keys


def test_number_free_names() -> None:
    assert (
        number_free("encoder_layer_3.h12") == number_free("encoder_layer_14.h0") != number_free("encoder_block_3.h12")
    )


# -- Sections ----------------------------------------------------------------------------------------------------------


def test_a_wire_is_in_the_module_that_contains_all_its_slots() -> None:
    wires = [
        wire("stem", "stem.weight", "blocks.0.out.weight", "blocks.1.out.weight"),
        wire("blocks.0.in", "blocks.0.in.weight", "blocks.0.out.weight", size=7),
        wire("head.inner", "head.inner.weight", "head.outer.weight"),
    ]
    assert lines_of(outline(wires)) == ["stem 4", "blocks.0:", "  in 7", "head:", "  inner 4"]


def test_a_wire_of_one_layer_keeps_its_name() -> None:
    assert lines_of(outline([wire("fc", "fc.weight", "fc.bias")])) == ["fc 4"]
    assert lines_of(outline([wire("a.fc[3]", "a.fc.weight")])) == ["a:", "  fc[3] 4"]


def test_no_wires() -> None:
    assert outline([]) == OutlineSection("")


def test_equal_blocks_are_joined() -> None:
    wires = [wire(f"net.layers.{i}.in", f"net.layers.{i}.in.weight", f"net.layers.{i}.out.weight") for i in range(24)]
    assert lines_of(outline(wires)) == ["net.layers.0 … net.layers.23 (×24):", "  in 4"]


def test_a_different_block_is_separate() -> None:
    sizes = [4, 4, 5, 4, 4]
    wires = [wire(f"b.{i}.in", f"b.{i}.in.weight", f"b.{i}.out.weight", size=n) for i, n in enumerate(sizes)]
    assert lines_of(outline(wires)) == [
        "b:",
        "  0 … 1 (×2):",
        "    in 4",
        "  2:",
        "    in 5",
        "  3 … 4 (×2):",
        "    in 4",
    ]


def test_alternating_blocks_are_joined() -> None:
    wires = [wire(f"b.{i}.in", f"b.{i}.in.weight", f"b.{i}.out.weight", size=4 + i % 2) for i in range(8)]
    assert lines_of(outline(wires)) == ["b.0 … b.7 (×4):", "  0:", "    in 4", "  1:", "    in 5"]


def test_nested_blocks_fold_inside_out() -> None:
    wires = [
        wire(f"s.{i}.b.{j}.in", f"s.{i}.b.{j}.in.weight", f"s.{i}.b.{j}.out.weight") for i in range(3) for j in range(2)
    ]
    assert lines_of(outline(wires)) == ["s.0.b.0 … s.2.b.0 (×3):", "  0.b.0 … 0.b.1 (×2):", "    in 4"]


def test_three_similar_wires_are_one_line_and_two_are_not() -> None:
    chain = [wire(str(i), f"{i}.weight", f"{i + 1}.weight") for i in range(5)]
    assert lines_of(outline(chain)) == ["0 … 4 (×5) 4"]
    assert lines_of(outline(chain[:2])) == ["0 4", "1 4"]


def test_dependent_wires_are_under_their_base() -> None:
    heads = wire("b.0.q/outer", *(f"b.{i}.{x}.weight" for i in range(3) for x in "qv"), size=2)
    inner = [
        wire(f"b.{i}.{x}/inner", f"b.{i}.{x}.weight", over=("b.0.q/outer",), size=8 if x == "q" else 6)
        for i in range(3)
        for x in "qv"
    ]
    assert lines_of(outline([heads, *inner])) == [
        "b:",
        "  0.q/outer 2",
        "    0.q/inner … 2.q/inner (×3) 8",
        "    0.v/inner … 2.v/inner (×3) 6",
    ]


def test_a_dependent_wire_without_a_base_is_separate() -> None:
    assert lines_of(outline([wire("a.q/inner", "a.q.weight", over=("still 3",))])) == ["a:", "  q/inner 4"]


def test_every_wire_of_a_network_is_in_the_outline_once() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).eval()
    sym = symmetry(model, torch.zeros(1, 3, 8))

    def counted(section: OutlineSection) -> int:
        def lines(line: OutlineLine) -> int:
            return line.count * (1 + sum(map(lines, line.dependents)))

        return section.count * (sum(map(lines, section.lines)) + sum(map(counted, section.sections)))

    assert "layers.0 … layers.3 (×4):" in lines_of(outline(sym.wires))
    assert counted(outline(sym.wires)) == len(sym.wires)


# -- Frozen axes -------------------------------------------------------------------------------------------------------


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
    assert [(r.text, len(r.axes), r.axes[0]) for r in frozen_reasons(frozen)] == [
        ("its rows are looked up by index (embedding)", 3, "c.weight axis 0"),
        ("positions along it matter to conv2d", 2, "a.weight axis 2"),
        ("it is an axis of the model's output", 1, "head.weight axis 0"),
        ("there is no rule for aten.sort.default", 1, "f.weight axis 0"),
    ]


SVG = "{http://www.w3.org/2000/svg}"


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def stack(*hidden: int, width: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(3, width), *(Block(width, h) for h in hidden), nn.Linear(width, 2))


def nested() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 6), *(nn.Sequential(Block(6, 4), Block(6, 4)) for _ in range(3)), nn.Linear(6, 2))


class Own(nn.Module):
    """Parameters of the model itself, outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(2, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x @ self.first.T) @ self.second.T


class Joined(nn.Module):
    """Two layers side by side, then one that reads both."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Linear(3, 4), nn.Linear(3, 5), nn.Linear(9, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.both(torch.cat([torch.relu(self.left(x)), torch.tanh(self.right(x))], -1))


class Recurrent(nn.Module):
    """Two layers of LSTM: many parameters in one module."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.head = nn.LSTM(3, 4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    return nn.Sequential(nn.Linear(3, 8), nn.TransformerEncoder(layer, 3, enable_nested_tensor=False))


MODELS = {
    "mlp": lambda: nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 2)),
    "convolutions": lambda: nn.Sequential(
        *(nn.Unflatten(1, (3, 1, 1)), nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 2, 1))
    ),
    "blocks": lambda: stack(4, 4, 4, 4),
    "turns": lambda: stack(4, 5, 4, 5, 4, 5),
    "nested": nested,
    "encoder": encoder,
    "own": Own,
    "joined": Joined,
    "lstm": Recurrent,
    "rigid": lambda: nn.Linear(3, 2),
}


@cache
def made(name: str) -> tuple[Symmetry, nn.Module]:
    model = MODELS[name]().eval()
    example = torch.randn(1, 2, 3) if name in ("encoder", "lstm") else torch.randn(2, 3)
    return symmetry(model, example), model


@pytest.mark.parametrize("name", MODELS)
def test_the_picture_is_valid_and_draws_every_wire_once(name: str) -> None:
    sym, model = made(name)
    root = ElementTree.fromstring(wire_graph(sym, model, name).encode())
    drawn = [g.attrib["data-wire"] for g in root.iter(f"{SVG}g") if "data-wire" in g.attrib]
    representative = fold_boxes(sym, model).representative
    assert set(representative) == {w.name for w in sym.wires}
    assert sorted(drawn) == sorted(set(representative.values()))
    sizes = {w.name: (w.size, str(w.group)) for w in sym.wires}
    assert all(sizes[wire] == sizes[drawn] for wire, drawn in representative.items())


@pytest.mark.parametrize("name", MODELS)
def test_the_picture_has_a_description(name: str) -> None:
    sym, model = made(name)
    root = ElementTree.fromstring(wire_graph(sym, model, "my <net> & co").encode())
    head = {child.get("id"): child.text or "" for child in root[:2]}
    assert root.get("role") == "img"
    assert set((root.get("aria-labelledby") or "").split()) == set(head)
    assert head["picture-title"] == "Wire graph of my <net> & co"
    assert f"{len(sym.wires)} wires" in head["picture-desc"]
    for wire in set(fold_boxes(sym, model).representative.values()):
        assert wire in head["picture-desc"]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_overlaps(name: str) -> None:
    sym, model = made(name)
    picture = _Picture(sym, fold_boxes(sym, model), name)
    for above, below in pairwise(picture.places):
        assert above.bottom < below.top
    for a, b in combinations(picture.drawn, 2):
        together = picture.acts[a][0] <= picture.acts[b][-1] and picture.acts[b][0] <= picture.acts[a][-1]
        assert not together or picture.lanes[a] != picture.lanes[b]
    for place in picture.places:
        heights = sorted(place.exits.values())
        assert all(place.top < y < place.bottom for y in heights)
        assert all(y - x >= 6 for x, y in pairwise(heights))


@pytest.mark.parametrize("name", MODELS)
def test_everything_is_inside_the_picture(name: str) -> None:
    sym, model = made(name)
    root = ElementTree.fromstring(wire_graph(sym, model, name).encode())
    width, height = (float(root.get(side) or 0) for side in ("width", "height"))
    for rect in root.findall(f".//{SVG}rect"):
        x, y, w, h = (float(rect.get(side) or 0) for side in ("x", "y", "width", "height"))
        assert x >= 0
        assert y >= 0
        assert x + w <= width
        assert y + h <= height
    for words in [*root.findall(f"{SVG}text"), *root.findall(f"{SVG}g/{SVG}text")]:
        assert float(words.get("x") or 0) + 6.6 * len(words.text or "") <= width
        assert 0 < float(words.get("y") or 0) <= height


@pytest.mark.parametrize("name", ["blocks", "nested", "encoder"])
def test_the_title_of_a_frame_is_at_its_top(name: str) -> None:
    """Inside the frame, above its content."""
    sym, model = made(name)
    picture = _Picture(sym, fold_boxes(sym, model), name)
    for frame in picture.frames:
        rect, words = ElementTree.fromstring(f"<g>{picture.draw_frame(frame)}</g>")
        x, y = (float(words.get(side) or 0) for side in ("x", "y"))
        left, top = (float(rect.get(side) or 0) for side in ("x", "y"))
        assert left < x
        assert top + 11 <= y < picture.places[frame.start].top


@pytest.mark.parametrize("name", MODELS)
def test_symbols_of_the_legend_are_aligned(name: str) -> None:
    """Each is inside its width, with its centre at the same height."""
    sym, model = made(name)
    legend = list(_Picture(sym, fold_boxes(sym, model), name).legend())
    assert len(legend) >= 3
    for sign, width, _ in legend:
        for rect in ElementTree.fromstring(f"<g>{sign}</g>").iter("rect"):
            x, y, w, h = (float(rect.get(side) or 0) for side in ("x", "y", "width", "height"))
            whole = h > 6  # not one of the bars inside a cell
            assert x >= 0
            assert x + w <= width
            assert not whole or y + h / 2 == 11


@pytest.mark.parametrize("name", MODELS)
def test_crosses_are_centred_between_cells(name: str) -> None:
    for row in (row for box in boxes_of(*made(name)) for row in box.rows):
        colours = {wire: "red" for axis in row.axes for segment in axis for wire in segment.wires}
        parts = ElementTree.fromstring(f"<g>{row_cells(7.0, 0.0, row, colours)}</g>")
        cells = [(float(r.get("x") or 0), float(r.get("width") or 0)) for r in parts.iter("rect") if r.get("rx")]
        crosses = [float(t.get("x") or 0) for t in parts.iter("text") if t.text == "×"]
        assert len(crosses) == len(row.axes) - 1 == len(cells) - 1
        gaps = [(x + w, beyond) for (x, w), (beyond, _) in pairwise(cells)]
        assert crosses == pytest.approx([(start + end) / 2 for start, end in gaps], abs=0.1)
        assert all(end - start >= 8 for start, end in gaps), "room for the cross"
        assert cells[-1][0] + cells[-1][1] - 7.0 == pytest.approx(row_width(row), abs=0.1)


@pytest.mark.parametrize(
    ("name", "frames"),
    [
        ("mlp", []),
        ("blocks", [("1 … 4", 4, 0)]),
        ("turns", [("1 … 6", 3, 0)]),
        ("nested", [("1 … 3", 3, 0), ("1.0 … 1.1", 2, 1)]),
        ("encoder", [("1.layers.0 … 1.layers.2", 3, 0)]),
    ],
)
def test_repeated_blocks_are_drawn_once(name: str, frames: list[tuple[str, int, int]]) -> None:
    sym, model = made(name)
    folded = fold_boxes(sym, model)
    assert [(f.text, f.count, f.depth) for f in folded.frames] == frames
    repeats = [1] * len(folded.boxes)
    for frame in folded.frames:
        for i in range(frame.start, frame.end):
            repeats[i] *= frame.count
    assert sum(repeats) == len(boxes_of(sym, model)), "folded blocks are counted"


def test_different_blocks_are_not_folded() -> None:
    for model in (stack(4, 5, 6), nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))):
        sym = symmetry(model, torch.randn(1, 6 if isinstance(model[1], nn.Linear) else 3))  # type: ignore[index]
        assert fold_boxes(sym, model).frames == ()


def axes(name: str) -> dict[str, tuple[tuple[Segment, ...], ...]]:
    return {f"{box.path}.{row.names[0]}": row.axes for box in boxes_of(*made(name)) for row in box.rows}


def test_the_wires_of_axes() -> None:
    assert axes("mlp") == {
        "0.weight": ((Segment(8, ("0",)),), (Segment(3, ()),)),
        "2.weight": ((Segment(8, ("2",)),), (Segment(8, ("0",)),)),
        "4.weight": ((Segment(2, ()),), (Segment(8, ("2",)),)),
    }


def test_blocks_of_one_axis_are_segments() -> None:
    assert axes("joined")["both.weight"][1] == (Segment(4, ("left",)), Segment(5, ("right",)))


def test_heads_and_their_width_share_a_segment() -> None:
    attention = axes("encoder")["1.layers.0.self_attn.in_proj_weight"][0]
    assert [len(segment.wires) for segment in attention] == [2, 2], "queries and keys, then values"
    assert sum(segment.size for segment in attention) == 24


def test_parameters_of_the_model_itself_are_drawn() -> None:
    assert axes("own") == {
        ".first": ((Segment(5, ("first",)),), (Segment(3, ()),)),
        ".second": ((Segment(2, ()),), (Segment(5, ("first",)),)),
    }


def test_frozen_axes_are_grey() -> None:
    sym, model = made("rigid")
    assert sym.wires == ()
    grey = wire_graph(sym, model, "rigid").count(f'fill="{GREY}"')
    assert grey == 2 + 1, "two axes and the legend"


def test_elements_escape_their_attributes() -> None:
    assert element("g", "x", data_wire='a"<b') == "<g data-wire='a\"&lt;b'>x</g>"
