"""Storage: what outlives the program. It knows the engine's values, and no interface."""
