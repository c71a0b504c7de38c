"""Texts in and vectors out over one request, as long as it may be."""
