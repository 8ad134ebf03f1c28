"""What training scripts do: small scripts, each with what comes of compiling it (docs/does-my-script-run.md)."""

from tests.scripts import data, models, optimizers, python, training
from tests.scripts.row import Row

ROWS: tuple[Row, ...] = (*data.ROWS, *models.ROWS, *training.ROWS, *optimizers.ROWS, *python.ROWS)
