"""Models that run elsewhere: OpenAI-compatible servers, asked over HTTP."""
