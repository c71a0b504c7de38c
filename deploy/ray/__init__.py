"""The service, and a job that embeds files, on a Ray cluster; needs requirements/cluster.txt."""
