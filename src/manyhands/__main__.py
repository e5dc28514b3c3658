"""`python -m manyhands` is `manyhands`; so is `torchrun -m manyhands`."""

import sys

from manyhands.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
