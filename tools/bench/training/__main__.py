"""``python -m tools.bench.training``: checkpoint strategies in a training loop (`strategy_comparison`)."""

from tools.bench.training.strategy_comparison import main

main()
