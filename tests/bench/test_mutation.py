"""bench/mutation.py: its changes are real, texts and types are left alone, and its page is what was measured."""

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
from mutation_tests import FILES, ROOT

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


def test_each_change_is_one_that_a_test_could_see() -> None:
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


def test_a_change_is_made_where_it_was_found() -> None:
    for mutant in mutants(SOURCE, "box.py"):
        changed = mutant.applied(SOURCE)
        assert ast.dump(ast.parse(changed)) != ast.dump(ast.parse(SOURCE))
        assert changed.count("\n") == SOURCE.count("\n")
        line = SOURCE.splitlines()[mutant.line - 1].replace(mutant.before, f"({mutant.after})")
        assert len(changed.splitlines()[mutant.line - 1]) == len(line)
    moved = next(mutants(SOURCE, "box.py"))
    with pytest.raises(ValueError, match="no longer reads"):
        moved.applied("\n" + SOURCE)


def test_a_sample_is_drawn_again_and_is_spread_over_the_package() -> None:
    first, second = sample(ROOT, "features", 12, seed=1), sample(ROOT, "features", 12, seed=1)
    assert first == second != sample(ROOT, "features", 12, seed=2)
    assert len({mutant.file for mutant in first}) > 4
    for mutant in first:
        assert mutation.found_again(vars(mutant)) is not None


def test_every_package_has_test_files() -> None:
    for package, patterns in FILES.items():
        assert (ROOT / "src" / "intertwine" / package).is_dir()
        for pattern in patterns:
            assert list((ROOT / "tests").glob(f"test_{pattern}.py")), (package, pattern)


CHILDREN = """
from mutation_tests import in_child
def endless():
    while True: pass
print(in_child(lambda: 3, 60), in_child(lambda: 1 // 0, 60), in_child(endless, 0.3))
"""


def test_a_child_that_does_not_end_is_stopped() -> None:
    """In a process of its own: to fork a process with threads, as pytest's may be, is no good idea."""
    said = subprocess.run([sys.executable, "-c", CHILDREN], cwd=ROOT / "bench", capture_output=True, text=True)
    assert said.stdout == "3 70 None\n", said.stderr


def test_the_table_is_what_was_measured() -> None:
    page = (DOCS / "testing.md").read_text(encoding="utf-8")
    held = json.loads(mutation.RESULTS.read_text(encoding="utf-8"))
    assert mutation.written(page, held) == page, "run: python bench/mutation.py --page"
    for entry in held.values():
        assert entry["before"] == len(entry["survivors"]) <= entry["mutants"]
        assert entry.get("after", 0) == sum(map(mutation.lives, entry["survivors"])) or "after" not in entry
