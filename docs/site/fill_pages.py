"""Pages filled in while the site is built, so that what they say of the code is never stale.

A page asks for something by a comment on a line of its own, which other readers of Markdown do not see:

    <!-- fill options: zoo train -->      the options of a command, from its parser
    <!-- fill reference: align -->        the public names of a room, from their docstrings
    <!-- fill notebook: merge_models -->  a script of examples/, text and code
"""

from __future__ import annotations

import re

from command_options import option_tables
from percent_script import as_markdown
from public_names import reference

#: What a page can ask for → what is written in its place.
FILLINGS = {"options": option_tables, "reference": reference, "notebook": as_markdown}
ASKED = re.compile(r"^<!-- fill ([a-z]+): ([\w ]+) -->$", re.M)


def fill(page: str) -> str:
    """The page with everything it asks for.

    >>> fill("a page").strip()
    'a page'
    """
    return ASKED.sub(_filling, page)


def _filling(asked: re.Match[str]) -> str:
    kind, name = asked.groups()
    if kind not in FILLINGS:
        raise ValueError(f"A page asks for {asked[0]}; there is no {kind!r}, only {', '.join(FILLINGS)}.")
    return FILLINGS[kind](name)
