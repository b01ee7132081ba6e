"""finecast for models of Hugging Face's transformers."""
