"""Ferry's reference trainer and its kit. Importing this package imports nothing else."""
