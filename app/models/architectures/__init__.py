"""The transformers: BERT's kind and Qwen3's."""
