"""Which blocks of which prompts are cached where: hashes, nodes, the tree of prefixes, and what happens to it."""
