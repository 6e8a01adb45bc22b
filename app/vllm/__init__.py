"""vLLM with this project's drafting. Nothing else in the project knows vLLM."""
