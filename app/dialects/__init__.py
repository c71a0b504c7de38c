"""APIs of other servers and services, one module per API."""
