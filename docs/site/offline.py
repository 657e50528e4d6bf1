"""Whether built pages load anything from elsewhere: scripts, styles, fonts or pictures. Links to read on may lead out.

python docs/site/offline.py build/site
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

#: What a browser fetches by itself, in HTML and in style sheets.
TAG = re.compile(r"<(?:script|img|iframe|source|video|audio|embed|link|image|use)\b[^>]*>", re.I)
FETCHED = re.compile(r"""(?:\bsrc|\bsrcset|\bhref|\bdata-src)\s*=\s*["']?((?:https?:)?//[^"'\s>]+)""", re.I)
STYLE = re.compile(r"""(?:url\(\s*["']?|@import\s+["'])((?:https?:)?//[^"')\s]+)""", re.I)


def fetched(text: str) -> list[str]:
    """Addresses outside that a page or a style sheet would load.

    >>> fetched('<script src="https://cdn.example/a.js"></script> <a href="https://example.com">read on</a>')
    ['https://cdn.example/a.js']
    """
    return [address for tag in TAG.findall(text) for address in FETCHED.findall(tag)] + STYLE.findall(text)


def outside(folder: Path) -> dict[str, list[str]]:
    """File → what it would load from elsewhere."""
    files = sorted(file for kind in ("html", "css") for file in folder.rglob(f"*.{kind}"))
    if not files:
        raise SystemExit(f"{folder} holds no page. Build the site first: make site")
    found = {str(file.relative_to(folder)): fetched(file.read_text(encoding="utf-8")) for file in files}
    return {name: addresses for name, addresses in found.items() if addresses}


if __name__ == "__main__":
    found = outside(Path(sys.argv[1]))
    for name, addresses in found.items():
        print(f"{name} loads {', '.join(addresses)}", file=sys.stderr)
    sys.exit(1 if found else 0)
