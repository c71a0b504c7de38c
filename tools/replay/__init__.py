"""Repeats logged requests."""
