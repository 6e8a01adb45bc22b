"""Heads: small networks that a model brings with it, which guess what it will say next."""
