"""dstui: set up, check, launch and watch DeepSpeed training from a terminal."""

__version__ = "0.1.0"
