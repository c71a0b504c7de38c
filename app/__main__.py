"""`python -m app` serves."""

from app.process import run

if __name__ == "__main__":
    run()
