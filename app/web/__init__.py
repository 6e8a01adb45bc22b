"""What the program sends to browsers."""
