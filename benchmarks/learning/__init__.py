"""Practice in one process, for questions about learning: no benchmark, but what `benchmarks.credit` stands on."""
