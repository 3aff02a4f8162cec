"""`python -m runner` is `ferry`."""

if __name__ == "__main__":
    # In here: processes that `runner.manifest` starts read this file again, and have no use for the command line.
    from runner.cli import main

    main()
