"""One module for each engine: how it is loaded, called at its best, and its answer read.

A worker imports the one that it is asked for, inside an environment that has that engine's package.
Each offers `PACKAGE`, the name of that package, and `Adapter(folder, precision)`, whose
`encode(texts, setting)` is timed, and whose `vectors(answer)` makes `Vectors` of what it answers.
"""
