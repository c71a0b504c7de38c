"""Which work runs next: jobs, the queue, and the choice of a batch."""
