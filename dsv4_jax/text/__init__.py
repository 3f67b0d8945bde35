"""Text to token ids and back: tokenizers and chat templates of checkpoints. Imports no jax."""
