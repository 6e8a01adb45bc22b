"""Models that run elsewhere: OpenAI-compatible servers, called over HTTP."""
