"""Models that find spans of text."""
