"""Every device: its threads, its consumer of the queue, its limits, and its failures."""
