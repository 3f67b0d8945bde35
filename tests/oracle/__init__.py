"""Independent NumPy models of what the cache must do: written from the published maths, not from the jnp code."""
