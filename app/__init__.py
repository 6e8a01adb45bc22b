"""The interface: a Gradio app over the engine and the storage."""
