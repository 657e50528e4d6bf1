"""A script of examples/ in the percent format as a page: its text cells as text, its code cells as code.

VS Code, PyCharm and jupytext read that format: `# %% [markdown]` begins a cell of text, `# %%` one of code.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

EXAMPLES = Path(__file__).parents[2] / "examples"
CELL = re.compile(r"^# %%(?P<markdown> \[markdown\])?.*\n", re.M)


def as_markdown(name: str) -> str:
    """The page of the script of that name; its docstring comes first."""
    return converted((EXAMPLES / f"{name}.py").read_text(encoding="utf-8"))


def converted(script: str) -> str:
    """Markdown out of a percent script.

    >>> print(converted('\"\"\"Add numbers.\"\"\"\\n# %% [markdown]\\n# One:\\n# %%\\n1 + 1\\n'))
    Add numbers.
    <BLANKLINE>
    One:
    <BLANKLINE>
    ```python
    1 + 1
    ```
    """
    marks = list(CELL.finditer(script))
    ends = [*(mark.start() for mark in marks[1:]), len(script)]
    cells = [ast.get_docstring(ast.parse(script)) or ""]
    for mark, end in zip(marks, ends, strict=True):
        text = script[mark.end() : end].strip("\n")
        cells.append(_uncommented(text) if mark["markdown"] else f"```python\n{text}\n```")
    return "\n\n".join(filter(None, cells))


def _uncommented(text: str) -> str:
    return "\n".join(re.sub(r"^# ?", "", line) for line in text.splitlines())
