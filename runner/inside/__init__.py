"""What runs inside a container before torchrun, and what host and container must compute in the same way.

Standard library and `runner.errors` only: this folder is copied into every image.
"""
