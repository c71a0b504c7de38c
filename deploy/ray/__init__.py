"""A job that embeds files on a Ray cluster, and an example; needs requirements/cluster.txt."""
