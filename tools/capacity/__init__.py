"""How many devices and replicas a load needs: measure, simulate, tell."""
