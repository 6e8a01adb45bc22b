"""Measurements. Each command prints a table for people, then one JSON line."""
