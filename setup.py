import re
from pathlib import Path

from setuptools import find_packages, setup

here = Path(__file__).parent
version = re.search(r'__version__ = "(.+)"', (here / "txl" / "__init__.py").read_text(encoding="utf-8")).group(1)

setup(
    name="txl",
    version=version,
    description="Transformer-XL: train it, evaluate it with a longer memory, import its relative attention",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.11",
    packages=find_packages(include=["txl", "txl.*"]),
    package_data={"txl": ["py.typed"]},
    install_requires=["torch>=2.10", "numpy", "tokenizers>=0.21", "safetensors>=0.4", "tqdm", "matplotlib"],
    extras_require={"test": ["pytest>=8", "ruff"]},
    entry_points={"console_scripts": ["txl = txl.cli:main"]},
)
