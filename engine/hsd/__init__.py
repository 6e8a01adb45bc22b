"""Draft-model stacks: hierarchical speculative decoding (arXiv 2510.19705)."""
