"""Train a Transformer, or use one: `python main.py --config=configs/quickstart.py --workdir=runs/quickstart`."""
