"""`python -m intertwine.cli`."""

import sys

from intertwine.cli import main

if __name__ == "__main__":
    sys.exit(main())
