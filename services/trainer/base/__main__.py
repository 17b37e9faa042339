"""`python -m services.trainer.base make|sft|probe|leaks`."""

from services.trainer.base.cli import app

if __name__ == "__main__":
    app()
