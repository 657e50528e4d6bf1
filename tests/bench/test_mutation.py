"""bench/mutation.py: mutants change the code, skip texts and types, and the page shows the stored results."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from pages import DOCS

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import mutation
from mutants import mutants, sample
from mutation_tests import ROOMS, ROOT, files_about

SOURCE = '''
"""Words, 1 + 1."""
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    x: int = 1
class Box:
    def size(self, least: "Float[Tensor, '3']" = 2) -> int:
        """At least 3 < 4."""
        def inner(a):
            return -a
        if self.open:
            raise ValueError(f"{1 + 1}" + str(3 < 4))
        return max(inner(least), len(self.words or ())) * 2.0
    def __repr__(self):
        return str(1 + 1)
pairs = [a for a, b in zip(p, q, strict=True) if "é" and a not in b]
'''


def test_mutants_of_a_source() -> None:
    found = [(m.function, m.before, m.after) for m in mutants(SOURCE, "box.py")]
    whole = "max(inner(least), len(self.words or ()))"
    assert sorted(found) == sorted(
        [
            ("Box.size", "2", "3"),
            ("Box.size", "-a", "a"),
            ("Box.size", "self.open", "not self.open"),
            ("Box.size", f"{whole} * 2.0", f"{whole} / 2.0"),
            ("Box.size", whole, whole.replace("max", "min")),
            ("Box.size", "self.words or ()", "self.words and ()"),
            ("Box.size", "2.0", "3.0"),
            ("", '"é" and a not in b', "'é' or a not in b"),
            ("", "a not in b", "a in b"),
        ]
    )


def test_a_mutant_is_applied_at_its_position() -> None:
    for mutant in mutants(SOURCE, "box.py"):
        changed = mutant.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.count("\n") == SOURCE.count("\n")
        line = SOURCE.splitlines()[mutant.line - 1].replace(mutant.before, f"({mutant.after})")
        assert len(changed.splitlines()[mutant.line - 1]) == len(line)
    moved = next(mutants(SOURCE, "box.py"))
    with pytest.raises(ValueError, match="no longer reads"):
        moved.applied("\n" + SOURCE)


def test_a_sample_is_reproducible_and_spread_over_the_room() -> None:
    first, second = sample(ROOT, "stitch", 12, seed=1), sample(ROOT, "stitch", 12, seed=1)
    assert first == second != sample(ROOT, "stitch", 12, seed=2)
    assert len({mutant.file for mutant in first}) > 4
    for mutant in first:
        assert mutation.found_again(vars(mutant)) is not None


@pytest.mark.parametrize("room", ROOMS)
def test_every_room_has_test_files(room: str) -> None:
    source, *files = files_about(ROOT, room)
    assert (ROOT / source).is_dir()
    assert files
    assert all((ROOT / file).is_file() for file in files)


CHILDREN = """
from mutation_tests import in_child
def endless():
    while True: pass
print(in_child(lambda: 3, 60), in_child(lambda: 1 // 0, 60), in_child(endless, 0.3))
"""


def test_a_child_that_does_not_end_is_stopped() -> None:
    """In a separate process: the process of pytest may have threads, and must not be forked."""
    said = subprocess.run([sys.executable, "-c", CHILDREN], cwd=ROOT / "bench", capture_output=True, text=True)
    assert said.stdout == "3 70 None\n", said.stderr


def test_the_page_shows_the_stored_results() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    held = json.loads(mutation.RESULTS.read_text(encoding="utf-8"))
    assert mutation.written(page, held) == page, "run: python bench/mutation.py --page"
    for entry in held.values():
        assert entry["before"] == len(entry["survivors"]) <= entry["mutants"]
        assert entry.get("after", 0) == sum(map(mutation.lives, entry["survivors"])) or "after" not in entry
