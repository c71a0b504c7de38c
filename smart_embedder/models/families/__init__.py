"""Transformers: BERT (with RoBERTa and XLM-RoBERTa) and Qwen3."""
