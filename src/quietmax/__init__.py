"""Private predictions from ordinary classifiers, with guarantees you can audit."""

from quietmax.version import __version__

__all__ = ["__version__"]
