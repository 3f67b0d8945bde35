"""The package's version, where every room can read it and the build finds it."""

__version__ = "0.1.0"
