"""Draw docs/images/architecture.svg: the rooms of the package, how many modules each has, and the flow of one model.

python docs/architecture_figure.py
"""

from __future__ import annotations

from pathlib import Path

from intertwine.lab.report.svg import EDGE, FAINT, GREY, INK, PALETTE, document, element, text

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "intertwine"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
#: Rows of rooms, from the top of the house to the ground: name → what it makes. A room imports only from rows below it.
ROWS: tuple[dict[str, str], ...] = (
    {"cli": "one file a command"},
    {
        "lab/zoo": "trained networks", "lab/study": "plans → tables", "lab/report": "tables → a page",
        "lab/papers": "tables, figures",
    },
    {"testing": "conformance suites"},
    {
        "align": "b moved onto a", "connect": "barriers, merging", "measure": "similarity of layers",
        "stitch": "front + map + back", "fold": "smaller networks", "inspect": "what units show",
    },
    {"canonical": "one form per orbit", "data": "batches, layers, scores", "checkpoints": "files → modules"},
    {"symmetry": "Graph → Symmetry → Element"},
    {"graph": "module → Graph"},
)  # fmt: skip
WIDTH, ROW, GAP, LEFT = 880, 58, 26, 96
LABELS = ("command line", "laboratory", "suites", "verbs", "floor", "core", "core")


def modules(room: str) -> int:
    """How many Python files a room has, without `__init__.py`."""
    return sum(file.name != "__init__.py" for file in (SOURCE / room).rglob("*.py"))


def box(x: float, y: float, width: float, room: str, purpose: str, colour: str) -> str:
    """One room: its name, what it makes, and the number of its modules."""
    middle = x + width / 2
    return "\n".join(
        (
            element("rect", x=x, y=y, width=width, height=ROW, rx=6, fill="#ffffff", stroke=colour, stroke_width=1.5),
            text(middle, y + 19, f"{room}/", INK, text_anchor="middle", font_weight="bold"),
            text(middle, y + 35, purpose, INK, text_anchor="middle", font_size=9),
            text(middle, y + 50, f"{modules(room)} modules", FAINT, text_anchor="middle", font_size=9),
        )
    )


def main() -> None:
    parts, y = [], 16.0
    for number, (row, label) in enumerate(zip(ROWS, LABELS, strict=True)):
        colour = PALETTE[1] if label == "laboratory" else PALETTE[4] if label == "command line" else PALETTE[0]
        width = (WIDTH - LEFT - 16 - 10 * (len(row) - 1)) / len(row)
        parts.append(element("rect", x=LEFT - 8, y=y - 6, width=WIDTH - LEFT, height=ROW + 12, rx=8, fill=GREY))
        parts.append(text(8, y + 32, label, FAINT))
        for i, (room, purpose) in enumerate(row.items()):
            parts.append(box(LEFT + i * (width + 10), y, width, room, purpose, colour))
        if number + 1 < len(ROWS):
            x, top, end = (LEFT + WIDTH) / 2, y + ROW + 8, y + ROW + GAP - 8
            parts.append(element("line", x1=x, y1=top, x2=x, y2=end - 4, stroke=EDGE, stroke_width=2))
            parts.append(element("path", d=f"M {x - 5} {end - 5} L {x + 5} {end - 5} L {x} {end + 2} Z", fill=EDGE))
        y += ROW + GAP
    words = "Rooms of intertwine from the command line down to the graph; arrows are imports, which run downward only."
    height = y + 14
    parts.append(
        text(LEFT, y + 2, "Arrows are imports: a room imports only from the rows below it and from its own row.", FAINT)
    )
    PICTURE.write_text(
        document(WIDTH + 8, height, "The rooms of intertwine", words, "\n".join(parts)), encoding="utf-8"
    )
    print(f"wrote {PICTURE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
