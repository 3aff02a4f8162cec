"""`python -m runner` is `ferry`."""

from runner.cli import main

main()
