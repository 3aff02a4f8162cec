"""Ferry: moves a training run between GPU servers, mid-epoch, so that the moved run is the run that never moved."""

__version__ = "0.1.0"
