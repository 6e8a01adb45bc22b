"""What other programs ask, as OpenAI's clients ask it."""
