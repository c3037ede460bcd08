"""GGUF files as checkpoints: what a file says, its tokenizer, and its conversion to a folder of transformers."""
