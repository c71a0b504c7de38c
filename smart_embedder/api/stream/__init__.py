"""Streams: a request whose body and answer may be of any length."""
