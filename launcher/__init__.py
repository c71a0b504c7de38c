"""`start_server local`: from the arguments to a running server on this machine.

`python -m launcher` needs only the standard library. It makes `.venv` with the two packages of
requirements/launcher.lock and goes on there as `python -m launcher.local`, which reads .env as the
app does, installs what is missing and becomes the server. Containers are started by start_server.sh
and start_server.bat alone.
"""
