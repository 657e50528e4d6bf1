"""How Sphinx builds the site: `make site` writes build/site/index.html, without a network, and fails on any warning.

What is written into pages while the site is built (options of commands, the reference, the example scripts) is made by
the small modules in docs/site/; a page asks for it with a comment such as `<!-- fill options: align -->`.
"""

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent / "site"))

from fill_pages import fill
from sphinx.application import Sphinx

from intertwine.version import VERSION

project, author, release = "intertwine", "intertwine contributors", VERSION
copyright = author
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["images"]
source_suffix = {".md": "markdown"}

html_theme = "furo"
html_title = "intertwine"
html_copy_source = False
html_show_sphinx = False
myst_heading_anchors = 3  # links of the form page.md#a-heading

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"  # what the docstring does not explain stands in the signature
autodoc_preserve_defaults = True
napoleon_google_docstring, napoleon_numpy_docstring = True, False
napoleon_use_ivar, napoleon_use_rtype = True, False
default_role = "code"  # docstrings mark code by single quotes, as Markdown does
add_module_names = False
smartquotes = False  # --data must stay --data
#: A star in a docstring is a star (*example_args), not the beginning of emphasis; examples and `code` are left alone.
STAR = re.compile(r"(`[^`]*`)|\*")
SECTION = re.compile(r"(Args|Attributes|Raises):$")
ENTRY = re.compile(r" {4}\*{0,2}\w+(, \*{0,2}\w+)*: ")


def readable(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Make docstrings, which are plain text, into what Sphinx reads."""
    section = False
    for i, line in enumerate(lines):
        if line.lstrip().startswith((">>>", "...")):
            continue
        if line and not line.startswith(" "):
            section = bool(SECTION.match(line))
        elif section and re.match(r" {4}\S", line) and not ENTRY.match(line):
            line = f"    {line}"  # an entry goes on: Sphinx knows that by the indent alone
        lines[i] = STAR.sub(lambda found: found[1] or r"\*", line)


def setup(app: Sphinx) -> None:
    """Called by Sphinx: fill the pages as they are read."""
    app.connect("autodoc-process-docstring", readable, priority=1)  # before napoleon reads them
    app.connect("source-read", lambda _, name, source: source.__setitem__(0, fill(source[0])))
