"""Heads: small networks that come with a model and predict its next tokens."""
