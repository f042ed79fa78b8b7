"""Changes of transactions turned into CDC messages; no I/O."""
