"""All tests, in layers. A package, so that a module has one name and is imported once."""
