"""`python -m dsv4_jax`."""

import sys

from .cli import main

sys.exit(main())
