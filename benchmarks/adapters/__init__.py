"""One module for each engine: how it is loaded, called at its best, and its answer read.

A worker imports the one that it is asked for, inside an environment that has that engine's package;
each offers `PACKAGE`, the name of that package, and `load(folder, precision)`, an `Adapter`.
"""
