"""`python -m jaxtap`: see `jaxtap.cli`."""

import sys

from jaxtap.cli import main

if __name__ == "__main__":
    sys.exit(main())
