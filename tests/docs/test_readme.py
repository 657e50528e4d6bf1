"""README: its ten lines print what stands below them, but for the digits of errors, which differ from run to run."""

import re
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")


def without_errors(text: str) -> list[str]:
    """Lines with every number such as 3.9e-15 left out."""
    return [re.sub(r"\d+(\.\d+)?e-\d+", "…", line) for line in text.strip().splitlines()]


def test_the_ten_lines_print_what_stands_below_them() -> None:
    code, printed = re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", README, re.S)[0]
    with redirect_stdout(StringIO()) as out:
        exec(code, {})
    assert without_errors(out.getvalue()) == without_errors(printed)
