"""The paths of this service's own API."""
