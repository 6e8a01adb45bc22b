"""Strata for other programs: the one package here whose name clashes with nobody's."""

__version__ = "0.1.0"
