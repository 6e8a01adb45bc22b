"""Where a model's forward happens. torch and llama_cpp are imported only inside this package."""
