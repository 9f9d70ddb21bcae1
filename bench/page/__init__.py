"""The page of benchmarks: its summary, its plots and README's table, from docs/benchmarks/figures.toml."""
