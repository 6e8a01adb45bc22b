"""What the program does for its users, without Gradio and without HTML."""
