"""Encoders of BERT's, RoBERTa's and XLM-RoBERTa's kind."""
