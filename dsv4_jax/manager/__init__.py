"""The host side: decides which bytes go where and says so in plans. Imports no jax."""
