"""The tiers behind the device cache: host memory (`host`, `swap`, `staging`, `transfer`) and block stores.

`records` and `planning` import no jax.
"""
