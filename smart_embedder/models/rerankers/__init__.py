"""Models that score a query together with a passage."""
