"""The engine: drafting, verification, decoding. It knows no storage and no interface."""
