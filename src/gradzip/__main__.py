"""`python -m gradzip` is the command `gradzip`."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
