"""The APIs of other servers and services, each a module over the same engine."""
