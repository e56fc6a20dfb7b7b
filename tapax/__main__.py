"""`python -m tapax`: see `tapax.cli`."""

import sys

from tapax.cli import main

if __name__ == "__main__":
    sys.exit(main())
