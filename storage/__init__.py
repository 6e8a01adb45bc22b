"""Storage: everything that survives a restart. It uses the engine's values, and no interface."""
