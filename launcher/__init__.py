"""`start_server local`: starts the server on this machine.

`python -m launcher` needs only the standard library. It makes `.venv` with the two packages of
requirements/launcher.lock, and there runs `python -m launcher.local`, which reads .env, installs
missing packages and becomes the server. start_server.sh and start_server.bat start containers
without this package.
"""
