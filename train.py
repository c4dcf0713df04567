"""Train a Transformer-XL language model.

python train.py configs/quickstart.toml
python train.py configs/quickstart.toml data.train=my.txt run_dir=runs/mine
python train.py --resume runs/mine
"""

import sys

from txl.cli import train

if __name__ == "__main__":
    sys.exit(train())
