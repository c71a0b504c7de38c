"""Files for deploying the service."""
