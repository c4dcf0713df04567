"""Evaluate a run with memories of several lengths.

python eval.py runs/quickstart
python eval.py runs/quickstart --data other.txt --mem-len 128 512 2048 --json result.json
"""

import sys

from txl.cli import evaluate

if __name__ == "__main__":
    sys.exit(evaluate())
