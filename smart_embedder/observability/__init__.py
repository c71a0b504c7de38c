"""What an operator sees: logs, metrics and traces."""
