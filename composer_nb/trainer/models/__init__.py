"""Models, tokenizers, and Hugging Face checkpoints in and out."""
