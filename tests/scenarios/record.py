"""Write ``outcomes.csv`` anew: ``PYTHONPATH=.:tests:tests/support python tests/scenarios/record.py``, from the checkout.

A commit that changes the file says of each row why.
"""

from __future__ import annotations

from pathlib import Path

import pandas

from scenarios.changes import CHANGES
from scenarios.ways import WAYS, outcome

PATH = Path(__file__).parent / "outcomes.csv"

if __name__ == "__main__":
    rows = [{"change": change, "way": way, "outcome": outcome(change, way)} for change in CHANGES for way in WAYS]
    pandas.DataFrame(rows).to_csv(PATH, index=False)
