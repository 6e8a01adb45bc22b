"""The recipe of the embedded family: from texts to tokens, from tokens to weights, to files."""
