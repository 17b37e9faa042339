"""What a fleet would do: attempts of many lengths, a trainer, and the rule that paces them, simulated before any machine runs."""
