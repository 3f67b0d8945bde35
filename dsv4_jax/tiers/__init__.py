"""Where blocks live besides the device: pinned host memory, and storage behind it."""
