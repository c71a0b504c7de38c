"""The service as a process: its port, its connections, and how it ends. Knows uvicorn."""
