"""`python -m fireflyer` is `ff`."""

import sys

from fireflyer.cli import main

if __name__ == "__main__":
    sys.exit(main(program="python -m fireflyer"))
