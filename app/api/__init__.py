"""The API for other programs, in OpenAI's format."""
