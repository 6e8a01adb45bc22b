"""The databases that draft, one tier per file, and how their candidates become one tree."""
