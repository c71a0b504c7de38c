"""`python -m app` serves."""

from app.main import run

if __name__ == "__main__":
    run()
