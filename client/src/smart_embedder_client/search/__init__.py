"""Hybrid search in a Qdrant collection, with the scores of each stage and the words behind them."""
