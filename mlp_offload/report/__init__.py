"""What the steps of a run say about it: numbers, a verdict, pictures. Pure; no torch."""
