"""What the container runs first; everything it does is `runner.inside.start`."""

import sys

sys.path.insert(0, "/opt/ferry")

from runner.inside.start import main

main()
