"""`python -m dsv4_jax`."""

from .cli import entry

entry()
